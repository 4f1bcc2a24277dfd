#pragma once

#include <chrono>
#include <cstddef>
#include <functional>

#include "lockstep/base/event.h"
#include "lockstep/base/thread.h"
#include "lockstep/net/http/http_message.h"
#include "lockstep/net/socket/socket.h"

namespace lockstep {

struct HttpLimits {
  // When one more comes, the one that has been idle the longest is closed.
  std::size_t connections = 64;
  // For a whole request to come, and for a reader to take some of its answer.
  std::chrono::milliseconds patience = std::chrono::seconds(20);
};

// Answers HTTP requests on a thread of its own, which gives way to all other threads of the host
// (nice 19). Sockets never block it: who reads slowly waits for nobody and nobody for him. What a
// client sends wrong is answered with 4xx and ends its connection, nothing else. The destructor
// closes all connections and waits for the handler that runs, if one does.
class HttpServer {
 public:
  // Called on the server's thread, one request at a time. What it throws is answered with 500.
  using Handler = std::function<HttpResponse(const HttpRequest&)>;

  // `often`, if it is given, is called on that thread as well, about every second.
  HttpServer(Socket listener, Handler handler, std::function<void()> often = {},
             HttpLimits limits = {});
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  SocketAddress address() const { return listener_.local_address(); }

 private:
  class Loop;

  const Socket listener_;
  const Handler handler_;
  const std::function<void()> often_;
  const HttpLimits limits_;
  const Event stop_;
  Thread thread_;  // last: it uses all of the above
};

}  // namespace lockstep
