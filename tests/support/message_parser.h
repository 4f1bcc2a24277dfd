#pragma once

#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/wire/join_messages.h"
#include "lockstep/wire/message.h"

namespace lockstep::test {

// Makes messages of what simulated peers send. Bytes that go to many receivers are parsed once.
class MessageParser {
 public:
  // Valid until the next call.
  const Message& parse(const SharedBytes& bytes) {
    if (last_.first != bytes) {
      MessageBuffer buffer;
      buffer.append(*bytes);
      auto message = buffer.next(kMaxRosterBody, "a simulated peer");
      LOCKSTEP_CHECK(message && buffer.rest().empty());
      last_ = {bytes, std::move(*message)};
    }
    return last_.second;
  }

 private:
  std::pair<SharedBytes, Message> last_;
};

}  // namespace lockstep::test
