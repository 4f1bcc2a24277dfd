#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/net/http/http_message.h"
#include "lockstep/net/http/http_server.h"
#include "tests/support/http_client.h"

namespace lockstep::http_test {
namespace {

using namespace std::chrono_literals;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace test;

int problem_of(const std::string& bytes) {
  const auto parsed = parse_http_request(bytes);
  return parsed ? parsed->problem : -1;  // -1: more must come
}

TEST(HttpMessage, ARequestIsReadWholeOrNotAtAll) {
  const std::string text =
      "GET /api/steps?after=3&run=a%20b+c HTTP/1.1\r\nHost: here\r\nCOOKIE: a=1; b=2\r\n\r\n";
  for (std::size_t size = 0; size < text.size(); ++size) {
    EXPECT_FALSE(parse_http_request(text.substr(0, size))) << size;
  }
  const auto parsed = parse_http_request(text + "GET");
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->problem, 0);
  EXPECT_EQ(parsed->bytes, text.size());
  EXPECT_EQ(parsed->request.path, "/api/steps");
  EXPECT_EQ(parsed->request.query.at("after"), "3");
  EXPECT_EQ(parsed->request.query.at("run"), "a b c");
  EXPECT_EQ(parsed->request.header("host"), "here");
  EXPECT_EQ(parsed->request.header("none"), "");
  EXPECT_EQ(parsed->request.cookie("b"), "2");
  EXPECT_FALSE(parsed->request.cookie("c"));
  EXPECT_TRUE(parsed->request.keeps_alive);
  EXPECT_FALSE(parsed->request.head);
}

TEST(HttpMessage, WhatEndsAConnection) {
  const auto keeps = [](const std::string& text) {
    return parse_http_request(text)->request.keeps_alive;
  };
  EXPECT_FALSE(keeps("GET / HTTP/1.0\r\n\r\n"));
  EXPECT_TRUE(keeps("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n"));
  EXPECT_FALSE(keeps("GET / HTTP/1.1\r\nConnection: close\r\n\r\n"));
  EXPECT_TRUE(keeps("HEAD / HTTP/1.1\n\n"));
}

TEST(HttpMessage, WhatIsWrongIsARefusalOfTheRightKind) {
  for (const char* line : {"",
                           "GET",
                           "GET /",
                           "GET / HTTP/2",
                           "GET http://here/ HTTP/1.1",
                           "GET  / HTTP/1.1",
                           "GET / HTTP/1.1 ",
                           "G@T / HTTP/1.1",
                           "GET /% HTTP/1.1",
                           "GET /%4 HTTP/1.1",
                           "GET /%zz HTTP/1.1",
                           "GET /%00 HTTP/1.1",
                           "GET /?a=%f HTTP/1.1",
                           "GET /\x01 HTTP/1.1",
                           "GET / HTTP/1.1\r\nno colon",
                           "GET / HTTP/1.1\r\n: no name",
                           "GET / HTTP/1.1\r\na b: c",
                           "GET / HTTP/1.1\r\nContent-Length: -1",
                           "GET / HTTP/1.1\r\nContent-Length: 1x",
                           "GET / HTTP/1.1\r\na: \x02",
                           "\x16\x03\x01\x02"}) {
    EXPECT_EQ(problem_of(std::string(line) + "\r\n\r\n"), 400) << line;
  }
  EXPECT_EQ(problem_of("POST / HTTP/1.1\r\n\r\n"), 405);
  EXPECT_EQ(problem_of("GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\n"), 413);
  EXPECT_EQ(problem_of("GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"), 413);
  EXPECT_EQ(problem_of("GET / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"), 0);
  EXPECT_EQ(problem_of(std::string(kMaxRequestHead, 'a')), -1);
  EXPECT_EQ(problem_of(std::string(kMaxRequestHead + 1, 'a')), 431);
  EXPECT_EQ(problem_of("GET / HTTP/1.1\r\na: " + std::string(9000, 'a') + "\r\n\r\n"), 431);
}

TEST(HttpMessage, WholeNumbers) {
  EXPECT_EQ(parse_whole("0"), 0);
  EXPECT_EQ(parse_whole("9223372036854775807"), INT64_MAX);
  for (const char* text : {"", "-1", "+1", "1 ", " 1", "1.0", "9223372036854775808", "x"}) {
    EXPECT_FALSE(parse_whole(text)) << text;
  }
}

constexpr std::size_t kLarge = std::size_t{32} << 20;  // more than the system's buffers hold

HttpResponse echo(const HttpRequest& request) {
  if (request.path == "/throws") throw std::runtime_error("broken");
  HttpResponse response;
  response.body = "path " + request.path;
  if (request.path == "/large") response.body = std::string(kLarge, 'x');
  return response;
}

TEST(HttpServer, AnswersOneAfterAnotherOnAConnection) {
  const HttpServer server(listen_tcp(SocketAddress::loopback_v4()), echo);
  const std::string answers = http_exchange(
      server.address(), "GET /a HTTP/1.1\r\n\r\nHEAD /b HTTP/1.1\r\n\r\nGET /c HTTP/1.0\r\n\r\n");
  EXPECT_THAT(answers, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answers, HasSubstr("path /a"));
  EXPECT_THAT(answers, HasSubstr("keep-alive"));
  EXPECT_EQ(answers.find("path /b"), std::string::npos);
  EXPECT_THAT(answers, EndsWith("path /c"));
}

TEST(HttpServer, WhatTheHandlerThrowsAndWhatClientsSendWrongEndsNothing) {
  const HttpServer server(listen_tcp(SocketAddress::loopback_v4()), echo);
  EXPECT_THAT(http_get(server.address(), "/throws"), StartsWith("HTTP/1.1 500 "));
  EXPECT_THAT(http_exchange(server.address(), "nonsense\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(http_exchange(server.address(), "PUT / HTTP/1.1\r\n\r\n"),
              StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(http_exchange(server.address(), std::string(20000, 'y')),
              StartsWith("HTTP/1.1 431 "));
  EXPECT_THAT(http_get(server.address(), "/well"), EndsWith("path /well"));
}

TEST(HttpServer, SlowAndManyReadersKeepNobodyWaiting) {
  const HttpServer server(listen_tcp(SocketAddress::loopback_v4()), echo, {},
                          {.connections = 4, .patience = 20s});
  std::vector<Socket> slow;
  for (int i = 0; i < 12; ++i) {  // more than it has room for; none of them reads
    slow.push_back(connect_tcp(server.address(), soon()));
    const std::string request = i % 2 == 0 ? "GET /large HTTP/1.1\r\n\r\n" : "GET /half";
    slow.back().send_if_heard(std::as_bytes(std::span(request)));
    EXPECT_THAT(http_get(server.address(), "/quick"), EndsWith("path /quick"));
  }
}

TEST(HttpServer, WhoTakesTooLongIsLeft) {
  const HttpServer server(listen_tcp(SocketAddress::loopback_v4()), echo, {}, {.patience = 50ms});
  const Socket reader = connect_tcp(server.address(), soon());
  const std::string request = "GET /large HTTP/1.0\r\n\r\n";
  reader.send_all(std::as_bytes(std::span(request)), soon());
  wait_for(reader.fd(), POLLIN, soon(), nullptr, "waiting for the answer");
  // The second of these comes when the reader has taken nothing for longer than that.
  for (int i = 0; i < 2; ++i) EXPECT_EQ(http_exchange(server.address(), "GET /half"), "");
  EXPECT_LT(http_rest(reader).size(), kLarge);
}

TEST(HttpServer, CallsOften) {
  std::atomic<int> calls = 0;
  const HttpServer server(listen_tcp(SocketAddress::loopback_v4()), echo, [&] { ++calls; });
  const Deadline deadline = soon();
  while (calls < 2 && !deadline.expired()) std::this_thread::sleep_for(1ms);
  EXPECT_GE(calls, 2);
}

}  // namespace
}  // namespace lockstep::http_test
