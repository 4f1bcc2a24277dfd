#include "lockstep/page/page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/page/document.h"
#include "lockstep/page/report.h"
#include "lockstep/page/run_folder.h"
#include "lockstep/page/svg_plots.h"
#include "lockstep/report/metrics.h"
#include "tests/support/http_client.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::page_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using namespace test;

std::string step_line(int step) {
  return R"({"step":)" + std::to_string(step) +
         R"(,"loss":2.5,"grad_norm":1,"lr":0.1,"tokens":64,"seconds":0.5,"tokens_per_s":128})";
}

SocketAddress address_of(const Page& page) {
  const std::string link = page.link();
  const std::size_t begin = std::string("http://").size();
  return *SocketAddress::parse(link.substr(begin, link.find('/', begin) - begin));
}

Json body_of(const std::string& answer) {
  return parse_json(answer.substr(answer.find("\r\n\r\n") + 4));
}

TEST(Page, AddressesAsUsersWriteThem) {
  EXPECT_EQ(to_string(parse_page_address("8080", "")), "127.0.0.1:8080");
  EXPECT_EQ(to_string(parse_page_address("0", "")), "127.0.0.1:0");
  EXPECT_EQ(to_string(parse_page_address("0.0.0.0:1", "sixteen letters!")), "0.0.0.0:1");
  EXPECT_EQ(to_string(parse_page_address("8080", "short")), "127.0.0.1:8080");
  EXPECT_EQ(to_string(parse_page_address("[::1]:9", "")), "[::1]:9");
  for (const char* text : {"", "x", "65536", "-1", "1.2.3.4", ":", "no such host.invalid:1"}) {
    EXPECT_THROW(parse_page_address(text, "sixteen letters!"), Error) << text;
  }
  EXPECT_THROW(parse_page_address("0.0.0.0:1", ""), Error);  // anybody could read it
}

// Its secret travels in the clear, and is a hash that is not stretched.
TEST(Page, BeyondLoopbackATokenThatCanBeGuessedIsRefused) {
  try {
    parse_page_address("0.0.0.0:1", "fifteen letters");
    FAIL() << "it was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("--page 0.0.0.0:1: "));
    EXPECT_THAT(error.what(), HasSubstr("15 bytes"));
  }
}

TEST(Page, ServesWhatItIsTold) {
  Page page({.address = SocketAddress::loopback_v4(), .out = {}, .token = {}});
  page.tell(R"({"event":"started","step":1,"steps":10})");
  for (int step = 1; step <= 3; ++step) page.tell(step_line(step));
  const SocketAddress address = address_of(page);
  EXPECT_THAT(http_get(address, "/"), HasSubstr("text/html"));
  const Json run = body_of(http_get(address, "/api/run"));
  EXPECT_EQ(run["step"], 3);
  EXPECT_EQ(run["steps"], 10);
  EXPECT_EQ(run["state"], "running");
  EXPECT_EQ(body_of(http_get(address, "/api/steps?after=1"))["step"], Json({2, 3}));
  EXPECT_THAT(http_get(address, "/metrics"),
              HasSubstr("lockstep_steps_total{run=\"this run\"} 3\n"));
}

TEST(Page, OffersWhatOthersHave) {
  Page page({.address = SocketAddress::loopback_v4(), .out = {}, .token = {}});
  const SocketAddress address = address_of(page);
  EXPECT_THAT(http_get(address, "/api/flight"), StartsWith("HTTP/1.1 404 "));
  page.offer("/api/flight", [] { return std::string("{\"a\":1}"); });
  EXPECT_EQ(body_of(http_get(address, "/api/flight"))["a"], 1);
  page.offer("/api/flight", []() -> std::string { throw std::runtime_error("not now"); });
  EXPECT_THAT(http_get(address, "/api/flight"), StartsWith("HTTP/1.1 500 "));
}

TEST(Page, BadInputIsRefused) {
  TemporaryFolder folder;
  Page page({.address = SocketAddress::loopback_v4(), .out = folder.path() + "/run", .token = {}});
  const SocketAddress address = address_of(page);
  for (const char* target : {"/api/steps?after=x", "/api/steps?after=-1", "/api/steps?after="}) {
    EXPECT_THAT(http_get(address, target), StartsWith("HTTP/1.1 400 ")) << target;
  }
  for (const char* target : {"/nothing", "/api", "/api/steps?run=..", "/api/steps?run=../../etc",
                             "/api/steps?run=/etc", "/api/steps?run=", "/../etc/passwd"}) {
    EXPECT_THAT(http_get(address, target), StartsWith("HTTP/1.1 404 ")) << target;
  }
  // Names that lead here by somebody else's doing.
  EXPECT_THAT(http_get(address, "/", "Host: evil.example\r\n"), StartsWith("HTTP/1.1 421 "));
  EXPECT_THAT(http_get(address, "/", ""), StartsWith("HTTP/1.1 421 "));
  EXPECT_THAT(http_get(address, "/", "Host: 127.0.0.1:99\r\n"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(http_get(address, "/", "Host: [::1]\r\n"), StartsWith("HTTP/1.1 200 "));
}

TEST(Page, BeyondLoopbackASecretIsNeeded) {
  const SocketAddress any = SocketAddress::any(AF_INET);
  const std::string token = "the-token-of-the-job";
  Page page({.address = any, .out = {}, .token = token});
  const std::string secret = page_secret(token);
  EXPECT_NE(secret, token);
  EXPECT_NE(secret, page_secret(token + "x"));
  EXPECT_THAT(page.link(), HasSubstr("/?secret=" + secret));
  const std::string link = page.link();
  const std::size_t colon = link.rfind(':');
  const auto address = SocketAddress::loopback_v4(
      static_cast<std::uint16_t>(std::stoi(link.substr(colon + 1, link.find('/', colon) - colon))));
  for (const std::string& target :
       {std::string("/"), std::string("/api/run"), std::string("/metrics"), "/?secret=" + token,
        "/?secret=" + secret + "x", std::string("/?secret=")}) {
    EXPECT_THAT(http_get(address, target), StartsWith("HTTP/1.1 401 ")) << target;
  }
  const std::string answer = http_get(address, "/?secret=" + secret);
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 "));
  const std::string cookie = "lockstep_page_" + std::to_string(address.port()) + "=";
  EXPECT_THAT(answer, HasSubstr("Set-Cookie: " + cookie + secret));
  EXPECT_THAT(http_get(address, "/metrics", "Authorization: Bearer " + secret + "\r\n"),
              StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(http_get(address, "/api/run", "Cookie: x=1; " + cookie + secret + "\r\n"),
              StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(http_get(address, "/api/run", "Cookie: " + cookie + token + "\r\n"),
              StartsWith("HTTP/1.1 401 "));
}

TEST(Page, APortThatIsTakenIsNamed) {
  const Socket other = listen_tcp(SocketAddress::loopback_v4());
  try {
    Page page({.address = other.local_address(), .out = {}, .token = {}});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), HasSubstr(to_string(other.local_address())));
  }
}

void write_run(const std::string& folder, int steps) {
  std::filesystem::create_directories(folder);
  std::ofstream file(folder + "/metrics.jsonl");
  for (int step = 1; step <= steps; ++step) file << step_line(step) << '\n';
  file << R"({"step":99,"loss")";  // the last line is not complete yet
}

TEST(Page, GoesOnWithTheFolderAndShowsTheRunsBesideIt) {
  TemporaryFolder folder;
  write_run(folder.path() + "/first", 3);
  write_run(folder.path() + "/second", 5);
  std::filesystem::create_directories(folder.path() + "/no run");
  Page page({.address = SocketAddress::loopback_v4(),
             .out = folder.path() + "/second/",
             .goes_on = true,
             .token = {}});
  const SocketAddress address = address_of(page);
  EXPECT_EQ(body_of(http_get(address, "/api/runs"))["runs"], Json({"second", "first"}));
  EXPECT_EQ(body_of(http_get(address, "/api/run"))["step"], 5);
  EXPECT_EQ(body_of(http_get(address, "/api/steps?run=first"))["step"], Json({1, 2, 3}));
  EXPECT_EQ(body_of(http_get(address, "/api/steps?run=second&after=4"))["step"], Json({5}));
  EXPECT_THAT(http_get(address, "/api/steps?run=no+run"), StartsWith("HTTP/1.1 404 "));
  // A resumed run does the last two steps again.
  page.tell(R"({"event":"started","step":4,"steps":9})");
  page.tell(step_line(4));
  EXPECT_EQ(body_of(http_get(address, "/api/steps"))["step"], Json({1, 2, 3, 4}));
}

TEST(RunFolder, ReadsOnBitByBitAndAgainWhenTheRunBeginsAnew) {
  TemporaryFolder folder;
  RunFolder run(folder.path());
  run.read(SIZE_MAX);
  EXPECT_EQ(run.record().step(), 0);
  write_run(folder.path(), 4);
  run.read(1);  // always a whole line
  EXPECT_EQ(run.record().step(), 1);
  run.read(SIZE_MAX);
  EXPECT_EQ(run.record().step(), 4);
  write_run(folder.path(), 2);
  run.read(SIZE_MAX);
  EXPECT_EQ(run.record().step(), 2);
}

TEST(Document, NothingInTheDataEndsTheScript) {
  RunRecord record;
  record.add(R"({"event":"lost","step":1,"how":"</script><script>alert(1)</script>"})");
  const std::string html = report_document({{"<run>", &record}});
  EXPECT_THAT(html, Not(HasSubstr("</script><script>alert")));
  EXPECT_THAT(html, HasSubstr("\\u003cscript>alert(1)"));
  for (const char* place : {"<!--data-->", "<!--style-->", "<!--plots-->", "<!--script-->"}) {
    EXPECT_THAT(html, Not(HasSubstr(place)));
  }
  // One file: nothing is fetched from elsewhere.
  for (const char* foreign : {"http://", "https://cdn", "src=\"", "@import", "<link"}) {
    std::string own = live_document();
    for (std::size_t at; (at = own.find("http://www.w3.org/")) != std::string::npos;) {
      own.erase(at, 7);  // names of XML, which nobody fetches
    }
    EXPECT_THAT(own, Not(HasSubstr(foreign)));
  }
}

TEST(SvgPlots, HaveEveryCurveAndEveryRank) {
  RunRecord record;
  for (int step = 1; step <= 3; ++step) {
    StepReport report;
    report.step = step;
    report.loss = 4.0 - step;
    report.seconds = 1;
    report.phases.resize(2);
    report.phases[1][Phase::kForward] = 0.25;
    report.phases[1][Phase::kHidden] = 0.125;
    report.straggler = Straggler{1, 0.5};
    if (step == 2) report.validation_loss = 2.5;
    record.add(metrics_line(report, 0));
  }
  const RunRecord empty;
  const auto plots = svg_plots({{"a <b>", &record}, {"empty", &empty}});
  std::map<std::string, std::string> by_name(plots.begin(), plots.end());
  ASSERT_EQ(by_name.size(), 6U);
  const std::string& loss = by_name.at("loss");
  EXPECT_THAT(loss, HasSubstr("a &lt;b> training"));
  EXPECT_THAT(loss, HasSubstr("M70.0 56.0L385.0"));  // from the corner, where the loss is highest
  EXPECT_THAT(loss, HasSubstr("<circle cx=\"385.0\""));  // the validation after step 2
  EXPECT_THAT(loss, Not(HasSubstr("empty training")));
  EXPECT_THAT(by_name.at("phases-1"), HasSubstr("rank 1"));
  EXPECT_THAT(by_name.at("phases-1"), HasSubstr("250 ms \u25c0 slow"));
  EXPECT_THAT(by_name.at("phases-1"), HasSubstr("<path d=\"M70.00 123.0h265.00\""));  // half a bar
}

TEST(Report, FindsRunsInFoldersAndNamesThemApart) {
  TemporaryFolder folder;
  write_run(folder.path() + "/x/one", 2);
  write_run(folder.path() + "/x/two", 2);
  write_run(folder.path() + "/y/one", 2);
  const auto runs = find_runs({folder.path() + "/x", folder.path() + "/y/one/"});
  EXPECT_THAT(runs, ElementsAre(folder.path() + "/x/one", folder.path() + "/x/two",
                                folder.path() + "/y/one/"));
  EXPECT_THROW(find_runs({folder.path()}), Error);
  const std::string path = write_report(runs, folder.path() + "/report");
  std::ifstream file(path);
  const std::string html(std::istreambuf_iterator<char>(file), {});
  for (const std::string& name : {std::string("x/one"), std::string("two"), std::string("y/one")}) {
    EXPECT_THAT(html, HasSubstr("\"name\":\"" + name + "\""));
  }
}

}  // namespace
}  // namespace lockstep::page_test
