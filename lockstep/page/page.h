#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/net/http/http_server.h"
#include "lockstep/net/socket/address.h"
#include "lockstep/page/run_folder.h"
#include "lockstep/report/run_record.h"

namespace lockstep {

struct PageOptions {
  SocketAddress address;  // as parse_page_address() returns it; port 0: any
  std::string out;        // the run's folder; empty: the page shows what it is told
  bool goes_on = false;   // what the folder tells so far belongs to the run
  std::string token;      // the job's, for page_secret()
};

// "8080", "0.0.0.0:8080", "[::]:0", "localhost:80": where --page is. Without a host: loopback.
// Throws Error{kInvalidArgument}, also for an address that others can reach where the job has no
// token.
SocketAddress parse_page_address(std::string_view text, std::string_view token);

// What a reader of a page that is not on loopback has to know. It tells nothing of the token that
// it is made from.
std::string page_secret(std::string_view token);

// The live page of a run: the page itself, its data as JSON (docs/page.md), and the same for
// Prometheus. Nothing that a reader does can stop the run or slow it: tell() only puts a line into
// a queue, and all else happens on the thread of the server.
class Page {
 public:
  // Throws Error{kIo} where the address cannot be opened.
  explicit Page(PageOptions options);
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  // How people open it: "http://127.0.0.1:8080/", with the secret where one is needed.
  std::string link() const;

  // A line of metrics.jsonl. Any thread.
  void tell(std::string line);
  // The run has ended. Where somebody has asked lately, serves a little longer: a reader who asks
  // once a second sees how it ended.
  void see_out();
  // Another endpoint, such as "/api/flight": what it returns is sent as JSON. It is called on the
  // server's thread and must not take long; what it throws is answered with 500. Any thread.
  void offer(std::string path, std::function<std::string()> json);

 private:
  HttpResponse answer(const HttpRequest& request);
  HttpResponse answer_known(const HttpRequest& request);
  HttpResponse steps_of(const HttpRequest& request);
  HttpResponse runs();
  bool is_allowed(const HttpRequest& request) const;
  void take_lines();
  const RunRecord* record_of(const std::string& run);

  const PageOptions options_;
  const std::string secret_;  // empty: none is needed
  const std::string name_;    // of the run
  SocketAddress bound_;       // constant once the server is there, as the next
  std::string cookie_;        // its name, which tells the port: all ports of a host share cookies
  // When somebody asked for the run; the clock's beginning: nobody yet.
  std::atomic<std::chrono::steady_clock::time_point> asked_{};
  std::mutex mutex_;
  std::vector<std::string> lines_;  // guarded by mutex_, as the next
  std::map<std::string, std::function<std::string()>> offered_;
  // Of the server's thread alone.
  std::optional<RunFolder> history_;  // until it is read
  const std::uint64_t history_bytes_;
  RunRecord record_;
  std::map<std::string, RunFolder> others_;  // other runs of the same folder, by name
  std::optional<HttpServer> server_;         // last: it uses all of the above
};

}  // namespace lockstep
