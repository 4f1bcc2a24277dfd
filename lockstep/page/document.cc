#include "lockstep/page/document.h"

#include <string_view>
#include <utility>

#include "lockstep/base/version.h"
#include "lockstep/files/json.h"
#include "lockstep/page/assets.h"

namespace lockstep {
namespace {

// Puts `text` where the document says <!--NAME-->.
void fill(std::string& document, std::string_view name, std::string_view text) {
  const std::string place = "<!--" + std::string(name) + "-->";
  const std::size_t at = document.find(place);
  if (at != std::string::npos) document.replace(at, place.size(), text);
}

// Nothing in JSON may end the element that it stands in.
std::string in_script(const Json& json) {
  std::string text = to_text(json);
  std::string safe;
  for (const char c : text) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
  return safe;
}

std::string document_with(Json data, std::string_view title) {
  data["version"] = version();
  data["plots"] = parse_json(assets::kPlotsJson)["plots"];
  std::string document(assets::kPageHtml);
  fill(document, "title", title);
  fill(document, "style", assets::kPageCss);
  fill(document, "plots", assets::kPlotsJs);
  fill(document, "script", assets::kPageJs);
  fill(document, "data", in_script(data));
  return document;
}

}  // namespace

std::string live_document() { return document_with({{"live", true}}, "Lockstep"); }

std::string report_document(const std::vector<ReportedRun>& runs) {
  Json data = {{"live", false}, {"runs", Json::array()}};
  for (const ReportedRun& run : runs) {
    Json entry = run_json(*run.record);
    entry["name"] = run.name;
    entry["series"] = steps_json(*run.record);
    data["runs"].push_back(std::move(entry));
  }
  return document_with(data, "Lockstep report");
}

}  // namespace lockstep
