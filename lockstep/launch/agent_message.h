#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// What `lockstep launch` and its agent on a host tell each other over the pipes of the remote
// shell: a line of words, the first of which says what it is. Pure.
//
// To the agent:
//   token T, folder DIR, timeout MS, name HOST, variable NAME=VALUE, argument WORD
//                                  what it will need, one at a time
//   listen WORKERS EXPECT LOG      start the job here; LOG may be empty
//   join WORKERS ADDRESS LOG       join it
//   signal NUMBER                  pass a signal on
//   kill                           end at once
//   beat                           we live
// From the agent:
//   ready VERSION                  it is there
//   listening ADDRESS, formed      of the job that it has started
//   refused TEXT                   it starts nothing, and why
//   ended CODE, killed NUMBER      how `lockstep train` has ended
//   beat
using AgentMessage = std::vector<std::string>;

// A line, with its end. What the agent prints besides passes as it is, so its messages begin with
// a byte that no text has.
std::string encode(const AgentMessage& message);
// Of a line without its end; nothing if it is no message.
std::optional<AgentMessage> decode_agent_message(std::string_view line);

// The number that a word of it is; nothing if there is no such word, or if it is no whole number.
std::optional<int> number_at(const AgentMessage& message, std::size_t word);

}  // namespace lockstep
