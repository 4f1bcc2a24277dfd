#include "lockstep/net/socket/interface.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/host.h"
#include "tests/support/ranks.h"

namespace lockstep::interface_test {
namespace {

using ::testing::HasSubstr;
using namespace test;

TEST(Interface, TheWayToLoopbackIsLoopback) {
  EXPECT_EQ(local_address_toward(SocketAddress::loopback_v4(80)), SocketAddress::loopback_v4());
  EXPECT_EQ(local_address_toward(SocketAddress::loopback_v6(0)), SocketAddress::loopback_v6());
}

TEST(Interface, IsFoundByNameInEitherFamily) {
  EXPECT_TRUE(interface_address("lo", AF_INET).is_loopback());
  EXPECT_EQ(interface_address("lo", AF_INET).family(), AF_INET);
  EXPECT_EQ(interface_address("lo", AF_INET6), SocketAddress::loopback_v6());
}

TEST(Interface, AnUnknownNameListsThoseThereAre) {
  const Error error = error_of([] { interface_address("eth99", AF_INET); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(), HasSubstr("eth99"));
  EXPECT_THAT(error.what(), HasSubstr("lo (127.0.0.1)"));
}

TEST(Interface, OnlyLoopbackNeedsNoToken) {
  EXPECT_NO_THROW(require_token_for(SocketAddress::loopback_v4(), ""));
  EXPECT_NO_THROW(require_token_for(SocketAddress::loopback_v6(), ""));
  EXPECT_NO_THROW(require_token_for(SocketAddress::any(AF_INET6), "sixteen letters!"));
  EXPECT_NO_THROW(require_token_for(SocketAddress::loopback_v4(), "secret"));
  for (const char* text : {"10.0.0.1:1", "0.0.0.0:1", "[::]:1", "[2001:db8::1]:1"}) {
    const Error error = error_of([&] { require_token_for(*SocketAddress::parse(text), ""); });
    EXPECT_EQ(error.code(), ErrorCode::kAuthentication);
    EXPECT_THAT(error.what(), HasSubstr("--token-file"));
    const Error shorter =
        error_of([&] { require_token_for(*SocketAddress::parse(text), "fifteen letters"); });
    EXPECT_EQ(shorter.code(), ErrorCode::kAuthentication);
    EXPECT_THAT(shorter.what(), HasSubstr("15 bytes"));
  }
}

TEST(Host, IsTheSameForBootAndNamespaceAlone) {
  const HostIdentity here = this_host();
  EXPECT_EQ(here, this_host());
  EXPECT_FALSE(here.hostname.empty());
  EXPECT_EQ(here.boot_id.size(), 36u);
  EXPECT_NE(here.network_namespace, 0u);
  HostIdentity other = here;
  other.hostname = "renamed";
  EXPECT_TRUE(same_host(here, other));
  other.network_namespace += 1;
  EXPECT_FALSE(same_host(here, other));
  other = here;
  other.boot_id[0] ^= 1;
  EXPECT_FALSE(same_host(here, other));
}

TEST(Host, FingerprintNamesTheCLibrary) { EXPECT_THAT(host_fingerprint(), HasSubstr("glibc 2.")); }

}  // namespace
}  // namespace lockstep::interface_test
