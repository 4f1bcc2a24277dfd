#include "lockstep/net/socket/address.h"

#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/ranks.h"

namespace lockstep::address_test {
namespace {

using namespace std::chrono_literals;

TEST(HostPort, ParsesNamesAndNumbers) {
  EXPECT_EQ(parse_host_port("node7:29500"), (HostPort{"node7", 29500}));
  EXPECT_EQ(parse_host_port("1.2.3.4:0"), (HostPort{"1.2.3.4", 0}));
  EXPECT_EQ(parse_host_port("[fe80::1%eth0]:65535"), (HostPort{"fe80::1%eth0", 65535}));
}

TEST(HostPort, RefusesWhatIsMalformed) {
  for (const char* text : {"", "host", "host:", ":1", "host:65536", "host:-1", "host:1x", "::1:80",
                           "[::1]", "[::1", "[]:1", "[::1]x:1", "host: 1"}) {
    EXPECT_FALSE(parse_host_port(text)) << text;
  }
}

TEST(HostPort, FormatsAsItParses) {
  for (const char* text : {"host:1", "1.2.3.4:5", "[::1]:6"}) {
    EXPECT_EQ(to_string(*parse_host_port(text)), text);
  }
}

TEST(SocketAddress, ParsesNumbersOnly) {
  EXPECT_EQ(to_string(*SocketAddress::parse("127.0.0.1:80")), "127.0.0.1:80");
  EXPECT_EQ(to_string(*SocketAddress::parse("[::1]:80")), "[::1]:80");
  EXPECT_FALSE(SocketAddress::parse("localhost:80"));
  EXPECT_FALSE(SocketAddress::parse("256.0.0.1:80"));
}

TEST(SocketAddress, KnowsLoopbackAndAny) {
  for (const char* text : {"127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"}) {
    EXPECT_TRUE(SocketAddress::parse(text)->is_loopback()) << text;
  }
  for (const char* text : {"10.0.0.1:1", "0.0.0.0:1", "[::]:1", "[2001:db8::1]:1"}) {
    EXPECT_FALSE(SocketAddress::parse(text)->is_loopback()) << text;
  }
  EXPECT_TRUE(SocketAddress::any(AF_INET).is_any());
  EXPECT_TRUE(SocketAddress::any(AF_INET6).is_any());
  EXPECT_FALSE(SocketAddress::loopback_v6().is_any());
}

TEST(SocketAddress, ComparesAddressAndPort) {
  EXPECT_EQ(SocketAddress::loopback_v4(7), SocketAddress::parse("127.0.0.1:7"));
  EXPECT_EQ(SocketAddress::loopback_v6().with_port(7), SocketAddress::parse("[::1]:7"));
  EXPECT_FALSE(SocketAddress::loopback_v4(7) == SocketAddress::loopback_v4(8));
  EXPECT_FALSE(SocketAddress::loopback_v4(7) == SocketAddress::loopback_v6(7));
}

TEST(Resolve, KnowsLocalhost) {
  const auto addresses = resolve({"localhost", 99}, test::soon());
  ASSERT_FALSE(addresses.empty());
  for (const SocketAddress& address : addresses) {
    EXPECT_TRUE(address.is_loopback());
    EXPECT_EQ(address.port(), 99);
  }
}

TEST(Resolve, NamesWhatItCannotFind) {
  const Error error = test::error_of([] {
    static_cast<void>(resolve({"no-such-host.invalid", 1}, test::soon()));
  });
  EXPECT_TRUE(error.code() == ErrorCode::kNoConnection || error.code() == ErrorCode::kTimeout);
  EXPECT_NE(std::string(error.what()).find("no-such-host.invalid"), std::string::npos);
}

TEST(Resolve, StopsAtTheDeadline) {
  const Error error = test::error_of([] {
    static_cast<void>(resolve({"no-such-host.invalid", 1}, Deadline::after(-1s)));
  });
  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
}

}  // namespace
}  // namespace lockstep::address_test
