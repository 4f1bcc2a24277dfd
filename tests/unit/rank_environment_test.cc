#include "lockstep/launch/rank_environment.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <map>

#include "tests/support/ranks.h"

namespace lockstep::rank_environment_test {
namespace {

using lockstep::test::error_of;
using ::testing::HasSubstr;

constexpr const char* kAll[] = {"RANK",
                                "WORLD_SIZE",
                                "LOCAL_RANK",
                                "MASTER_ADDR",
                                "MASTER_PORT",
                                "OMPI_COMM_WORLD_RANK",
                                "OMPI_COMM_WORLD_SIZE",
                                "OMPI_COMM_WORLD_LOCAL_RANK",
                                "PMI_RANK",
                                "PMI_SIZE",
                                "MPI_LOCALRANKID",
                                "SLURM_PROCID",
                                "SLURM_NTASKS",
                                "SLURM_LOCALID",
                                "SLURM_JOB_NODELIST",
                                "SLURM_JOB_ID",
                                "TORCHELASTIC_USE_AGENT_STORE",
                                "SLURM_STEP_ID",
                                "SLURM_RESTART_COUNT",
                                "TORCHELASTIC_RUN_ID",
                                "PMIX_NAMESPACE",
                                "LOCKSTEP_RENDEZVOUS_FD",
                                "LOCKSTEP_HOSTED",
                                "LOCKSTEP_ATTEMPT",
                                "LOCKSTEP_SECRET_FD",
                                "LOCKSTEP_NEWCOMER",
                                "JOB_COMPLETION_INDEX"};

// An environment with these variables and no others that matter; undone at the end.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& variables) {
    for (const char* name : kAll) {
      if (const char* value = std::getenv(name)) before_[name] = value;
      ::unsetenv(name);
    }
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() {
    for (const char* name : kAll) ::unsetenv(name);
    for (const auto& [name, value] : before_) ::setenv(name.c_str(), value.c_str(), 1);
  }

 private:
  std::map<std::string, std::string> before_;
};

RankEnvironment found_in(const std::map<std::string, std::string>& variables) {
  const Environment environment(variables);
  const auto found = rank_environment();
  EXPECT_TRUE(found);
  return found.value_or(RankEnvironment{});
}

void expect_rank(const RankEnvironment& found, int rank, int world_size,
                 std::optional<int> local_rank) {
  EXPECT_EQ(found.rank, rank);
  EXPECT_EQ(found.world_size, world_size);
  EXPECT_EQ(found.local_rank, local_rank);
}

TEST(RankEnvironment, NobodyStartedThis) {
  const Environment environment({{"LOCAL_RANK", "1"}, {"SLURM_NTASKS", "4"}});
  EXPECT_FALSE(rank_environment());
}

TEST(RankEnvironment, AsTorchrunSetsIt) {
  const auto found = found_in({{"RANK", "3"},
                               {"WORLD_SIZE", "4"},
                               {"LOCAL_RANK", "1"},
                               {"MASTER_ADDR", "node-a"},
                               {"MASTER_PORT", "29500"},
                               {"SLURM_PROCID", "0"}});
  expect_rank(found, 3, 4, 1);
  EXPECT_EQ(found.master_host, "node-a");
  EXPECT_EQ(found.master_port, 29500);
  EXPECT_FALSE(found.listener);
}

TEST(RankEnvironment, AsMpiLaunchersSetIt) {
  expect_rank(found_in({{"OMPI_COMM_WORLD_RANK", "1"},
                        {"OMPI_COMM_WORLD_SIZE", "2"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}),
              1, 2, 0);
  expect_rank(found_in({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}}), 1, 2, 1);
  expect_rank(found_in({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}), 0, 1, std::nullopt);
}

TEST(RankEnvironment, SlurmTellsWhereToMeet) {
  const std::map<std::string, std::string> variables = {
      {"SLURM_PROCID", "2"},  {"SLURM_NTASKS", "8"},
      {"SLURM_LOCALID", "1"}, {"SLURM_JOB_NODELIST", "node[07-09,12],login"},
      {"SLURM_STEP_ID", "0"}, {"SLURM_JOB_ID", "4123456"}};
  const auto found = found_in(variables);
  expect_rank(found, 2, 8, 1);
  EXPECT_EQ(found.master_host, "node07");
  EXPECT_EQ(found.master_port, 10000 + 4123456 % 20000);
  // Another step of the same job meets elsewhere, and who is told where, meets there.
  auto other = variables;
  other["SLURM_STEP_ID"] = "1";
  EXPECT_NE(found_in(other).master_port, found.master_port);
  other["MASTER_ADDR"] = "login";
  other["MASTER_PORT"] = "1234";
  EXPECT_EQ(found_in(other).master_host, "login");
  EXPECT_EQ(found_in(other).master_port, 1234);
}

TEST(RankEnvironment, AnIndexedJobOfKubernetesNumbersItsPods) {
  std::map<std::string, std::string> variables = {{"JOB_COMPLETION_INDEX", "2"},
                                                  {"WORLD_SIZE", "3"},
                                                  {"MASTER_ADDR", "train-0.net"},
                                                  {"MASTER_PORT", "29500"}};
  const auto found = found_in(variables);
  expect_rank(found, 2, 3, std::nullopt);
  EXPECT_EQ(found.master_host, "train-0.net");
  EXPECT_THAT(found.peers, testing::ElementsAre("train-1.net", "train-2.net"));
  // torchrun in a pod has its own numbers; pods that are not told how many they are work alone.
  variables["RANK"] = "1";
  expect_rank(found_in(variables), 1, 3, std::nullopt);
  EXPECT_THAT(found_in(variables).peers, testing::IsEmpty());
  const std::map<std::string, std::string> alone = {{"JOB_COMPLETION_INDEX", "2"}};
  const Environment environment(alone);
  EXPECT_FALSE(rank_environment());
}

TEST(RankEnvironment, PodsAreCalledByTheirIndex) {
  EXPECT_THAT(pods_after("a-b-0", 3), testing::ElementsAre("a-b-1", "a-b-2"));
  EXPECT_THAT(pods_after("train-0.x.default.svc", 2),
              testing::ElementsAre("train-1.x.default.svc"));
  for (const char* other : {"", "10.0.0.1", "train", "train-10.x", "train.x-0"}) {
    EXPECT_THAT(pods_after(other, 4), testing::IsEmpty()) << other;
  }
}

TEST(RankEnvironment, ABatchScriptAndAnInteractiveShellAreNoRanks) {
  std::map<std::string, std::string> variables = {
      {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "7"}};
  {
    const Environment environment(variables);
    EXPECT_FALSE(rank_environment());
  }
  variables["SLURM_STEP_ID"] = "4294967290";
  const Environment environment(variables);
  EXPECT_FALSE(rank_environment());
}

TEST(RankEnvironment, TorchrunsAgentKeepsItsPort) {
  std::map<std::string, std::string> variables = {{"RANK", "0"},
                                                  {"WORLD_SIZE", "2"},
                                                  {"MASTER_ADDR", "localhost"},
                                                  {"MASTER_PORT", "37447"},
                                                  {"TORCHELASTIC_USE_AGENT_STORE", "False"}};
  EXPECT_EQ(found_in(variables).master_port, 37447);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_EQ(found_in(variables).master_port, 10000 + 37447 % 20000);
}

TEST(RankEnvironment, ErrorsNameTheVariable) {
  const auto error_in = [](const std::map<std::string, std::string>& variables) {
    const Environment environment(variables);
    const Error error = error_of([] { rank_environment(); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return std::string(error.what());
  };
  EXPECT_THAT(error_in({{"RANK", "0"}}), HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(error_in({{"WORLD_SIZE", "2"}}), HasSubstr("RANK is not set"));
  EXPECT_THAT(error_in({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
              HasSubstr("RANK=2 is not a number from 0 to 1"));
  EXPECT_THAT(error_in({{"RANK", "0"}, {"WORLD_SIZE", "two"}}), HasSubstr("WORLD_SIZE=two"));
  EXPECT_THAT(error_in({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "-1"}}),
              HasSubstr("LOCAL_RANK=-1"));
  EXPECT_THAT(error_in({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}}),
              HasSubstr("MASTER_PORT is not set"));
  EXPECT_THAT(error_in({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "1"}}),
              HasSubstr("OMPI_COMM_WORLD_RANK=1"));
  EXPECT_THAT(error_in({{"SLURM_PROCID", "1"}}), HasSubstr("SLURM_NTASKS is not set"));
  EXPECT_THAT(error_in({{"SLURM_PROCID", "0"},
                        {"SLURM_NTASKS", "2"},
                        {"SLURM_STEP_ID", "0"},
                        {"SLURM_JOB_ID", "1"},
                        {"SLURM_JOB_NODELIST", "node[1-"}}),
              HasSubstr("SLURM_JOB_NODELIST=node[1-"));
}

TEST(RankEnvironment, FirstHost) {
  EXPECT_EQ(first_host("node1"), "node1");
  EXPECT_EQ(first_host("a.example.org,b"), "a.example.org");
  EXPECT_EQ(first_host("node[01-04,7]"), "node01");
  EXPECT_EQ(first_host("node[7,01-04],x"), "node7");
  EXPECT_EQ(first_host("rack[2-3]-node[010-011]"), "rack2-node010");
  EXPECT_EQ(first_host("rack[2]b.cluster,y"), "rack2b.cluster");
  for (const char* bad :
       {"", ",a", "node[", "node[1-2", "node[]", "node[-3]", "node[a-b]", "a]b"}) {
    EXPECT_FALSE(first_host(bad)) << bad;
  }
}

TEST(RankEnvironment, TellsOneStartOfAJobFromAnother) {
  const std::map<std::string, std::string> torchrun = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
  const auto with = [&](std::map<std::string, std::string> more) {
    more.insert(torchrun.begin(), torchrun.end());
    return found_in(more);
  };
  EXPECT_EQ(with({}).attempt, "");
  EXPECT_FALSE(with({}).hosted);
  EXPECT_EQ(with({{"TORCHELASTIC_RUN_ID", "none"}}).attempt, "");
  EXPECT_EQ(with({{"TORCHELASTIC_RUN_ID", "r7"}}).attempt, "torchrun r7");
  EXPECT_EQ(with({{"PMIX_NAMESPACE", "12@1"}}).attempt, "pmix 12@1");
  const auto ours = with({{"LOCKSTEP_ATTEMPT", "abc"}, {"LOCKSTEP_HOSTED", "1"}});
  EXPECT_EQ(ours.attempt, "abc");
  EXPECT_TRUE(ours.hosted);
  const auto slurm = [](const std::string& starts) {
    return found_in({{"SLURM_PROCID", "0"},
                     {"SLURM_NTASKS", "2"},
                     {"SLURM_JOB_NODELIST", "node1"},
                     {"SLURM_JOB_ID", "12"},
                     {"SLURM_STEP_ID", "0"},
                     {"SLURM_RESTART_COUNT", starts}});
  };
  EXPECT_NE(slurm("0").attempt, slurm("1").attempt);
  EXPECT_EQ(job_name("lockstep", ""), "lockstep");
  EXPECT_NE(job_name("lockstep", "abc"), job_name("lockstep", "abd"));
}

TEST(RankEnvironment, ANewcomerHasNoRank) {
  const Environment environment({{"LOCKSTEP_NEWCOMER", "1"},
                                 {"LOCAL_RANK", "2"},
                                 {"LOCKSTEP_HOSTED", "1"},
                                 {"LOCKSTEP_ATTEMPT", "this one"},
                                 {"MASTER_ADDR", "127.0.0.1"},
                                 {"MASTER_PORT", "7000"}});
  const auto found = rank_environment();
  ASSERT_TRUE(found);
  EXPECT_TRUE(found->newcomer());
  EXPECT_EQ(found->rank, -1);
  EXPECT_EQ(found->world_size, 0);
  EXPECT_EQ(found->local_rank, 2);
  EXPECT_TRUE(found->hosted);
  EXPECT_EQ(found->master_host, "127.0.0.1");
  EXPECT_EQ(found->master_port, 7000);
  EXPECT_EQ(found->attempt, "this one");
  const std::map<std::string, std::string> newcomer = {{"LOCKSTEP_NEWCOMER", "1"}};
  const Environment at_a_server(newcomer);
  EXPECT_TRUE(rank_environment()->newcomer());
  EXPECT_EQ(rank_environment()->master_host, "");
  const Environment rank({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_FALSE(rank_environment()->newcomer());
}

TEST(RankEnvironment, ReadsTheSecretThatTheLauncherHandsDown) {
  const Descriptor file(::memfd_create("secret", 0));
  ASSERT_EQ(::write(file.get(), "0123", 4), 4);
  const std::map<std::string, std::string> variables = {
      {"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCKSTEP_SECRET_FD", std::to_string(file.get())}};
  EXPECT_EQ(found_in(variables).secret, "0123");
  EXPECT_EQ(found_in(variables).secret, "0123");  // as often as it is asked
  EXPECT_TRUE(::fcntl(file.get(), F_GETFD) & FD_CLOEXEC);
  const Environment empty({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCKSTEP_SECRET_FD", "1000000"}});
  EXPECT_THAT(error_of([] { rank_environment(); }).what(), HasSubstr("no file with a secret"));
}

}  // namespace
}  // namespace lockstep::rank_environment_test
