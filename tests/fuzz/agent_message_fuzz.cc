// Feeds arbitrary lines to the decoder of what a launcher and its agents tell each other. A message
// comes back as it was when it is written again, on one line.
#include <string>
#include <string_view>

#include "lockstep/launch/agent_message.h"
#include "tests/fuzz/script.h"

using namespace lockstep;
using fuzz::require;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    AgentMessage message = {std::string(line)};  // any word can be sent
    if (const auto decoded = decode_agent_message(line)) {
      message = *decoded;
      require(!message.empty());
      for (std::size_t i = 0; i <= message.size(); ++i) {
        const auto number = number_at(message, i);
        require(!number || std::stoi(message[i]) == *number);
      }
    }
    std::string again = encode(message);
    require(again.find('\n') == again.size() - 1);
    again.pop_back();
    require(decode_agent_message(again) == message);
  }
  return 0;
}
