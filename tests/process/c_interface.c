/* A worker in C: everything that lockstep/c.h declares, once. Prints the hash of its lane sums,
 * which does not depend on the number of workers. usage: c_interface WHAT FOLDER, as a rank of a
 * launcher; WHAT is a transport, survive3 (of 3 workers), abort, abort_fails (who is told ends
 * with 1) or give_up */

#include <math.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "lockstep/c.h"

static lockstep_error last_error(void) {
  lockstep_error last = {.size = sizeof(last)};
  lockstep_last_error(&last);
  return last;
}

static void expect(int holds, int line, const char* condition) {
  if (holds) return;
  fprintf(stderr, "line %d: %s; last error: %s\n", line, condition, last_error().text);
  exit(1);
}
#define EXPECT(condition) expect(condition, __LINE__, #condition)
#define OK(call) EXPECT((call) == LOCKSTEP_OK)

enum { kLanes = 7, kElements = 5000, kCount = 1000 };

static void wait_for(lockstep_work* work) {
  lockstep_outcome outcome = {.size = sizeof(outcome)};
  OK(lockstep_work_wait(work, -1, &outcome));
  EXPECT(lockstep_work_done(work) == 1);
  EXPECT(outcome.first_non_finite == -1 && outcome.took_ns >= 0);
  lockstep_work_destroy(work);
}

static void versions_and_errors(void) {
  EXPECT(lockstep_abi_version() == LOCKSTEP_ABI_VERSION);
  EXPECT(strlen(lockstep_version()) >= 5);
  EXPECT(strcmp(lockstep_code_name(LOCKSTEP_PEER_LOST), "peer lost") == 0);
  EXPECT(last_error().code == LOCKSTEP_OK);
  EXPECT(lockstep_join(NULL, NULL) == LOCKSTEP_INVALID_ARGUMENT);
  EXPECT(last_error().code == LOCKSTEP_INVALID_ARGUMENT && last_error().rank == -1);
  EXPECT(strstr(last_error().text, "job is null") != NULL);
  lockstep_join_options unsized;
  memset(&unsized, 0, sizeof unsized);
  lockstep_job* job = NULL;
  EXPECT(lockstep_join(&unsized, &job) == LOCKSTEP_INVALID_ARGUMENT && job == NULL);
  EXPECT(lockstep_type_size(LOCKSTEP_BF16) == 2 && lockstep_type_size(17) == 0);
}

/* Programs of other versions: with fewer fields than the library knows, and with more. */
static void other_versions(lockstep_communicator* all) {
  lockstep_call_options shorter = {.size = offsetof(lockstep_call_options, check_finite)};
  shorter.timeout_ms = 20000;
  shorter.check_finite = 77; /* not looked at: it is beyond the size */
  OK(lockstep_barrier(all, &shorter, NULL));
  struct {
    lockstep_call_options known;
    int64_t later;
  } longer = {{.size = sizeof(longer)}, 0};
  OK(lockstep_barrier(all, &longer.known, NULL));
  longer.later = 1;
  EXPECT(lockstep_barrier(all, &longer.known, NULL) == LOCKSTEP_INVALID_ARGUMENT);
  EXPECT(strstr(last_error().text, "later version") != NULL);
  lockstep_error shortest = {.size = offsetof(lockstep_error, rank), .rank = 77};
  lockstep_last_error(&shortest);
  EXPECT(shortest.code == LOCKSTEP_INVALID_ARGUMENT && shortest.rank == 77);
}

static void collectives(lockstep_communicator* all, int rank, int n) {
  int64_t sum = 0;
  for (int r = 0; r < n; ++r) sum += r + 1;
  lockstep_call_options options = {.size = sizeof(options)};
  options.timeout_ms = 20000;
  options.check_finite = 1;
  options.step = 3;

  float data[kCount];
  for (int i = 0; i < kCount; ++i) data[i] = (float)(rank + 1);
  lockstep_work* work = NULL;
  OK(lockstep_all_reduce(all, data, kCount, LOCKSTEP_F32, LOCKSTEP_SUM, &options, &work));
  wait_for(work);
  for (int i = 0; i < kCount; ++i) EXPECT(data[i] == (float)sum);
  OK(lockstep_broadcast(all, data, kCount, LOCKSTEP_F32, n - 1, NULL, NULL));

  int64_t* gathered = calloc((size_t)n, sizeof *gathered);
  const int64_t own = rank * 10;
  OK(lockstep_all_gather(all, &own, 1, gathered, (size_t)n, LOCKSTEP_I64, NULL, NULL, NULL));
  for (int r = 0; r < n; ++r) EXPECT(gathered[r] == r * 10);
  OK(lockstep_gather(all, &own, 1, gathered, (size_t)n, LOCKSTEP_I64, 0, NULL, NULL, NULL));
  int64_t scattered = -1;
  OK(lockstep_scatter(all, gathered, (size_t)n, &scattered, 1, LOCKSTEP_I64, 0, NULL, NULL, NULL));
  EXPECT(scattered == own);
  int64_t reduced = 0;
  const int64_t one = rank + 1;
  OK(lockstep_reduce(all, &one, &reduced, 1, LOCKSTEP_I64, LOCKSTEP_MAX, 0, NULL, NULL));
  if (rank == 0) EXPECT(reduced == n);

  /* Part r has r + 1 elements. */
  size_t* counts = calloc((size_t)n, sizeof *counts);
  size_t total = 0;
  for (int r = 0; r < n; ++r) total += counts[r] = (size_t)r + 1;
  double* parts = calloc(total, sizeof *parts);
  double* part = calloc(counts[rank], sizeof *part);
  for (size_t i = 0; i < total; ++i) parts[i] = 1;
  OK(lockstep_reduce_scatter(all, parts, total, part, counts[rank], LOCKSTEP_F64, LOCKSTEP_SUM,
                             counts, NULL, NULL));
  EXPECT(part[0] == n);

  int32_t* sent = calloc((size_t)n, sizeof *sent);
  int32_t* came = calloc((size_t)n, sizeof *came);
  for (int r = 0; r < n; ++r) sent[r] = 100 * rank + r;
  OK(lockstep_all_to_all(all, sent, (size_t)n, came, (size_t)n, LOCKSTEP_I32, NULL, NULL, NULL,
                         NULL));
  for (int r = 0; r < n; ++r) EXPECT(came[r] == 100 * r + rank);
  OK(lockstep_barrier(all, NULL, NULL));

  /* What does not fit together is refused, and harms nobody. */
  EXPECT(lockstep_broadcast(all, data, kCount, LOCKSTEP_F32, n, NULL, NULL) ==
         LOCKSTEP_INVALID_RANK);
  EXPECT(lockstep_all_reduce(all, data, kCount, 42, LOCKSTEP_SUM, NULL, NULL) ==
         LOCKSTEP_INVALID_ARGUMENT);
  EXPECT(lockstep_all_reduce(all, NULL, kCount, LOCKSTEP_F32, LOCKSTEP_SUM, NULL, NULL) ==
         LOCKSTEP_INVALID_ARGUMENT);
  EXPECT(lockstep_all_gather(all, &own, 1, gathered, (size_t)n + 1, LOCKSTEP_I64, NULL, NULL,
                             NULL) == LOCKSTEP_SIZE_MISMATCH);

  /* The first element that is not finite, which the same collective finds on every rank. */
  data[17] = rank == 0 ? INFINITY : 1;
  OK(lockstep_all_reduce(all, data, kCount, LOCKSTEP_F32, LOCKSTEP_SUM, &options, &work));
  lockstep_outcome outcome = {.size = sizeof(outcome)};
  OK(lockstep_work_wait(work, -1, &outcome));
  EXPECT(outcome.first_non_finite == 17);
  lockstep_work_destroy(work);
  free(gathered), free(counts), free(parts), free(part), free(sent), free(came);
}

static void messages(lockstep_communicator* all, int rank, int n) {
  EXPECT(lockstep_send(all, &rank, 1, LOCKSTEP_I32, rank, 0, NULL, NULL) == LOCKSTEP_SELF_SEND);
  if (n < 2) return;
  /* Large ones both ways at once, around the ring. */
  enum { kLarge = 1 << 18 };
  double* out = calloc(kLarge, sizeof *out);
  double* in = calloc(kLarge, sizeof *in);
  out[kLarge - 1] = rank + 1;
  lockstep_work* works[2];
  OK(lockstep_send(all, out, kLarge, LOCKSTEP_F64, (rank + 1) % n, 5, NULL, &works[0]));
  OK(lockstep_recv(all, in, kLarge, LOCKSTEP_F64, (rank + n - 1) % n, 5, NULL, &works[1]));
  wait_for(works[0]);
  wait_for(works[1]);
  EXPECT(in[kLarge - 1] == (rank + n - 1) % n + 1);
  /* Rank 1 answers when it has heard from rank 0, which sees until then that nothing has come. */
  uint8_t letter = 'a';
  if (rank == 0) {
    lockstep_work* answer = NULL;
    OK(lockstep_recv(all, &letter, 1, LOCKSTEP_U8, 1, 0, NULL, &answer));
    EXPECT(lockstep_work_wait(answer, 0, NULL) == LOCKSTEP_NOT_YET);
    EXPECT(lockstep_work_wait(answer, 5, NULL) == LOCKSTEP_NOT_YET &&
           lockstep_work_done(answer) == 0);
    OK(lockstep_send(all, "b", 1, LOCKSTEP_U8, 1, 0, NULL, NULL));
    wait_for(answer);
    EXPECT(letter == 'c');
  } else if (rank == 1) {
    OK(lockstep_recv(all, &letter, 1, LOCKSTEP_U8, 0, 0, NULL, NULL));
    EXPECT(letter == 'b');
    OK(lockstep_send(all, "c", 1, LOCKSTEP_U8, 0, 0, NULL, NULL));
  }
  /* Rank 0 hears from all others, whoever comes first. */
  if (rank > 0) {
    OK(lockstep_send(all, &rank, 1, LOCKSTEP_I32, 0, 6, NULL, NULL));
  }
  for (int i = 1; rank == 0 && i < n; ++i) {
    int from = 0;
    OK(lockstep_recv_any(all, &from, 1, LOCKSTEP_I32, 6, NULL, &works[0]));
    lockstep_outcome outcome = {.size = sizeof outcome};
    OK(lockstep_work_wait(works[0], -1, &outcome));
    EXPECT(from > 0 && outcome.source == from);
    lockstep_work_destroy(works[0]);
  }
  free(out), free(in);
}

static void groups(lockstep_communicator* all, int rank, int n) {
  char name[64];
  OK(lockstep_communicator_name_of(all, rank, name, sizeof name));
  if (n > 1) EXPECT(strncmp(name, "rank ", 5) == 0);
  lockstep_communicator* part = NULL;
  OK(lockstep_communicator_split(all, rank % 2, -rank, &part));
  EXPECT(lockstep_communicator_world_size(part) == (n + 1 - rank % 2) / 2);
  lockstep_communicator_destroy(part);
  const int backwards[] = {n - 1, 0};
  if (n > 1 && (rank == 0 || rank == n - 1)) {
    OK(lockstep_communicator_subgroup(all, backwards, 2, "ends", &part));
    EXPECT(lockstep_communicator_rank(part) == (rank == 0 ? 1 : 0));
    float one = 1;
    OK(lockstep_all_reduce(part, &one, 1, LOCKSTEP_F32, LOCKSTEP_SUM, NULL, NULL));
    EXPECT(one == 2);
    lockstep_communicator_destroy(part);
  }
  OK(lockstep_communicator_check(all));
  lockstep_buffer* buffer = NULL;
  OK(lockstep_buffer_create(all, 4096, &buffer));
  float* shared = lockstep_buffer_data(buffer);
  shared[0] = 1;
  OK(lockstep_all_reduce(all, shared, 1024, LOCKSTEP_F32, LOCKSTEP_SUM, NULL, NULL));
  EXPECT(shared[0] == n && shared[1023] == 0);
  lockstep_buffer_destroy(buffer);
}

static float gradient_of(uint32_t lane, int i) {
  return sinf((float)(lane * 1000 + (uint32_t)i)) * 1e3f;
}

/* The sum in pieces, and by hand with what a program of its own would call: the same bits. */
static void lanes(lockstep_job* job, lockstep_communicator* all, int rank, int n) {
  lockstep_lane_sum* sum = NULL;
  OK(lockstep_lane_sum_create(job, kLanes, kElements, 2, 8192, &sum));
  size_t own = 0;
  OK(lockstep_lane_sum_count(sum, &own));
  EXPECT(lockstep_lane_sum_ready(sum, 0, 0, 1) ==
         LOCKSTEP_INVALID_ARGUMENT); /* no step has begun */
  OK(lockstep_lane_sum_begin(sum, 1));
  for (size_t i = 0; i < own; ++i) {
    uint32_t lane = 0;
    float* gradient = NULL;
    double* numbers = NULL;
    OK(lockstep_lane_sum_lane(sum, i, &lane));
    OK(lockstep_lane_sum_gradient(sum, i, &gradient, &numbers));
    for (int e = 0; e < kElements; ++e) gradient[e] = gradient_of(lane, e);
    numbers[0] = lane;
    numbers[1] = 0.1;
    EXPECT(lockstep_lane_sum_ready(sum, i, 10, 20) == LOCKSTEP_INVALID_ARGUMENT); /* a gap */
    OK(lockstep_lane_sum_ready(sum, i, 0, 3000));
    OK(lockstep_lane_sum_ready(sum, i, 3000, kElements));
  }
  float* gradient = NULL;
  double numbers[2];
  int code = LOCKSTEP_NOT_YET;
  while (code == LOCKSTEP_NOT_YET) code = lockstep_lane_sum_finish(sum, 20, &gradient, numbers);
  OK(code);
  EXPECT(numbers[0] == 21 && fabs(numbers[1] - 0.7) < 1e-9);

  uint32_t begin = 0, end = 0;
  OK(lockstep_lanes_of(kLanes, n, rank, &begin, &end));
  EXPECT(end - begin == own);
  lockstep_range nodes[kLanes];
  size_t partials = 0;
  OK(lockstep_partials_of(kLanes, n, rank, nodes, kLanes, &partials));
  EXPECT(nodes[0].begin == begin && nodes[partials - 1].end == end);
  lockstep_lane_step steps[kLanes];
  lockstep_merge merges[kLanes];
  size_t step_count = 0, merge_count = 0;
  uint32_t accumulators = 0;
  OK(lockstep_lane_schedule(kLanes, n, rank, steps, &step_count, merges, &merge_count,
                            &accumulators));
  float** memory = calloc(accumulators, sizeof *memory);
  for (uint32_t i = 0; i < accumulators; ++i) memory[i] = calloc(kElements, sizeof **memory);
  for (size_t i = 0; i < step_count; ++i) {
    for (int e = 0; e < kElements; ++e)
      memory[steps[i].accumulator][e] = gradient_of(steps[i].lane, e);
    for (uint32_t m = 0; m < steps[i].merges; ++m) {
      const lockstep_merge merge = merges[steps[i].first_merge + m];
      OK(lockstep_accumulate(memory[merge.into], memory[merge.from], kElements, LOCKSTEP_F32));
    }
  }
  lockstep_work* work = NULL;
  OK(lockstep_reduce_nodes(all, (const void* const*)memory, partials, kLanes, memory[0], kElements,
                           LOCKSTEP_F32, NULL, &work));
  wait_for(work);
  EXPECT(memcmp(memory[0], gradient, kElements * sizeof(float)) == 0);
  EXPECT(lockstep_find_non_finite(gradient, kElements, LOCKSTEP_F32) == kElements);

  uint8_t hash[LOCKSTEP_HASH_BYTES];
  OK(lockstep_blake3(gradient, kElements * sizeof(float), hash));
  if (rank == 0) {
    for (int i = 0; i < LOCKSTEP_HASH_BYTES; ++i) printf("%02x", hash[i]);
    printf("\n");
  }
  for (uint32_t i = 0; i < accumulators; ++i) free(memory[i]);
  free(memory);
  lockstep_lane_sum_destroy(sum);
}

static void checkpoints(const char* folder, int rank) {
  char path[512];
  snprintf(path, sizeof path, "%s/checkpoint-%d", folder, rank);
  int64_t shape[] = {2, 3};
  float weights[] = {1, 2, 3, 4, 5, 6};
  uint8_t flags[] = {1, 0};
  const lockstep_tensor tensors[] = {
      {sizeof(lockstep_tensor), "weights", "F32", shape, 2, weights, sizeof weights},
      {sizeof(lockstep_tensor), "flags", "BOOL", shape, 1, flags, sizeof flags}};
  OK(lockstep_checkpoint_save(path, 40, tensors, 2, "{}", 2));
  EXPECT(lockstep_checkpoint_save(path, 41, tensors, 2, NULL, 0) == LOCKSTEP_IO); /* it is there */
  EXPECT(lockstep_checkpoint_save(
             folder, 1,
             (const lockstep_tensor[]){{sizeof(lockstep_tensor), "w", "F32", shape, 2, weights, 4}},
             1, NULL, 0) == LOCKSTEP_INVALID_ARGUMENT);
  lockstep_checkpoint* checkpoint = NULL;
  OK(lockstep_checkpoint_open(path, &checkpoint));
  EXPECT(lockstep_checkpoint_step(checkpoint) == 40 && lockstep_checkpoint_count(checkpoint) == 2);
  const void* metadata = NULL;
  size_t bytes = 0;
  OK(lockstep_checkpoint_metadata(checkpoint, &metadata, &bytes));
  EXPECT(bytes == 2 && memcmp(metadata, "{}", 2) == 0);
  lockstep_tensor found = {.size = sizeof(found)};
  OK(lockstep_checkpoint_tensor(checkpoint, 0, &found));
  EXPECT(strcmp(found.name, "weights") == 0 && found.dimensions == 2 && found.shape[1] == 3);
  float back[6] = {0};
  void* const places[] = {back, NULL};
  OK(lockstep_checkpoint_read(checkpoint, places));
  EXPECT(memcmp(back, weights, sizeof back) == 0);
  lockstep_checkpoint_destroy(checkpoint);

  snprintf(path, sizeof path, "%s/checkpoint-%d/model.safetensors", folder, rank);
  FILE* file = fopen(path, "r+b");
  EXPECT(file != NULL && fseek(file, -1, SEEK_END) == 0 && fputc(7, file) == 7 &&
         fclose(file) == 0);
  snprintf(path, sizeof path, "%s/checkpoint-%d", folder, rank);
  OK(lockstep_checkpoint_open(path, &checkpoint));
  EXPECT(lockstep_checkpoint_read(checkpoint, places) == LOCKSTEP_IO);
  EXPECT(strstr(last_error().text, "damaged") != NULL);
  lockstep_checkpoint_destroy(checkpoint);
}

static void print_hash(const void* data, size_t bytes) {
  uint8_t hash[LOCKSTEP_HASH_BYTES];
  OK(lockstep_blake3_many(&data, &bytes, 1, hash));
  for (int i = 0; i < LOCKSTEP_HASH_BYTES; ++i) printf("%02x", hash[i]);
  printf("\n");
}

enum { kSteps = 8, kLossAt = 3, kWaitAt = 6, kWeights = 100 };

/* All workers get the weights of the one that has done most steps. */
static int64_t level(lockstep_job* job, int64_t done, float* weights) {
  lockstep_communicator* all = lockstep_job_communicator(job);
  const int n = lockstep_job_world_size(job);
  int64_t steps[16];
  EXPECT(n <= 16);
  OK(lockstep_all_gather(all, &done, 1, steps, (size_t)n, LOCKSTEP_I64, NULL, NULL, NULL));
  int donor = 0;
  for (int r = 1; r < n; ++r) {
    if (steps[r] > steps[donor]) donor = r;
  }
  OK(lockstep_broadcast(all, weights, kWeights, LOCKSTEP_F32, donor, NULL, NULL));
  return steps[donor];
}

static int train_step(lockstep_job* job, lockstep_lane_sum* sum, int64_t step, float* weights) {
  int code = lockstep_lane_sum_begin(sum, step);
  size_t own = 0;
  OK(lockstep_lane_sum_count(sum, &own));
  for (size_t i = 0; i < own && code == LOCKSTEP_OK; ++i) {
    uint32_t lane = 0;
    float* gradient = NULL;
    OK(lockstep_lane_sum_lane(sum, i, &lane));
    code = lockstep_lane_sum_gradient(sum, i, &gradient, NULL);
    if (code != LOCKSTEP_OK) break;
    for (int e = 0; e < kWeights; ++e) gradient[e] = gradient_of(lane + 7 * (uint32_t)step, e);
    if (step == kLossAt && lockstep_job_generation(job) == 1 && lockstep_job_rank(job) == 1) {
      raise(SIGKILL);
    }
    code = lockstep_lane_sum_ready(sum, i, 0, kWeights);
  }
  float* total = NULL;
  if (code == LOCKSTEP_OK) code = lockstep_lane_sum_finish(sum, -1, &total, NULL);
  if (code == LOCKSTEP_OK) {
    for (int e = 0; e < kWeights; ++e) weights[e] += total[e];
  }
  return code;
}

/* Rank 1 dies in a step; the others go on, and wait until somebody has come in its place. */
static void survive(lockstep_job* job, int workers) {
  float weights[kWeights] = {0};
  int64_t done = 0;
  const int newcomer = lockstep_job_newcomer(job);
  const void* told = NULL;
  size_t bytes = 0;
  if (newcomer) {
    EXPECT(lockstep_job_communicator(job) == NULL && lockstep_job_rank(job) == -1);
    OK(lockstep_job_description(job, &told, &bytes));
    EXPECT(bytes == 1 && memcmp(told, "c", 1) == 0);
    OK(lockstep_job_regroup(job, 0, LOCKSTEP_IN_ORDER));
    done = level(job, -1, weights);
  } else {
    OK(lockstep_job_describe(job, "c", 1, 0));
  }
  EXPECT(lockstep_job_too_few(job) == 0 && lockstep_job_stood_still(job) == 0);
  EXPECT(lockstep_job_regroup(job, 0, 42) == LOCKSTEP_INVALID_ARGUMENT);
  lockstep_lane_sum* sum = NULL;
  OK(lockstep_lane_sum_create(job, kLanes, kWeights, 0, 0, &sum));
  const time_t deadline = time(NULL) + 30;
  while (done < kSteps) {
    int code = done == kWaitAt && lockstep_job_world_size(job) < workers
                   ? LOCKSTEP_OK
                   : train_step(job, sum, done + 1, weights);
    if (code == LOCKSTEP_OK) {
      if (done != kWaitAt || lockstep_job_world_size(job) == workers) ++done;
      EXPECT(time(NULL) < deadline);
      lockstep_wishes wishes = {.size = sizeof(wishes)};
      OK(lockstep_job_wishes(job, &wishes));
      int32_t regroup = wishes.regroup;
      code = lockstep_broadcast(lockstep_job_communicator(job), &regroup, 1, LOCKSTEP_I32, 0, NULL,
                                NULL);
      if (code == LOCKSTEP_OK && regroup != 0) {
        OK(lockstep_job_regroup(job, done, LOCKSTEP_IN_ORDER));
        EXPECT(lockstep_job_newcomers(job) == 1);
        done = level(job, done, weights);
      }
    }
    if (code != LOCKSTEP_OK) {
      const lockstep_error error = last_error();
      EXPECT(code == LOCKSTEP_PEER_LOST && error.rank == 1);
      EXPECT(lockstep_job_survives(job, &error) == 1);
      OK(lockstep_job_regroup(job, done, LOCKSTEP_AFTER_LOSS));
      lockstep_departure gone = {.size = sizeof(gone)};
      EXPECT(lockstep_job_departed_count(job) == 1);
      OK(lockstep_job_departed(job, 0, &gone));
      EXPECT(gone.rank == 1 && gone.kind == LOCKSTEP_DIED && strlen(gone.name) > 0);
      EXPECT(lockstep_job_departed(job, 1, &gone) == LOCKSTEP_INVALID_ARGUMENT);
      done = level(job, done, weights);
    }
  }
  if (workers > 1) EXPECT(lockstep_job_generation(job) == 3);
  lockstep_lane_sum_destroy(sum);
  if (lockstep_job_rank(job) == 0) print_hash(weights, sizeof weights);
  OK(lockstep_job_leave(job));
}

/* One worker ends the job, or goes by itself: the other one is told who it was and why. */
static void end_by_words(lockstep_job* job, lockstep_communicator* all, int rank, const char* what,
                         const char* folder) {
  OK(lockstep_job_write_flight(job, folder, "a test"));
  const int giving_up = strcmp(what, "give_up") == 0;
  OK(lockstep_barrier(all, NULL, NULL));
  if (rank == 1 && giving_up) {
    OK(lockstep_job_give_up(job, "enough"));
  } else if (rank == 1) {
    OK(lockstep_job_abort(job, "enough"));
    OK(lockstep_communicator_abort(all, "more than enough"));
  } else {
    /* A job that survives goes on without who gives up. */
    const int code = lockstep_barrier(all, NULL, NULL);
    const lockstep_error error = last_error();
    EXPECT(code == (giving_up ? LOCKSTEP_PEER_LOST : LOCKSTEP_ABORTED) && error.code == code);
    EXPECT(error.rank == 1 && strstr(error.text, "enough") != NULL);
    EXPECT(lockstep_job_survives(job, &error) == giving_up);
    if (!giving_up) EXPECT(lockstep_communicator_check(all) == code);
    printf("told\n");
  }
}

int main(int argc, char** argv) {
  EXPECT(argc == 3);
  int workers = 0; /* that newcomers, too, are to wait for */
  const int surviving = sscanf(argv[1], "survive%d", &workers) == 1;
  const int ending = strncmp(argv[1], "abort", 5) == 0 || strcmp(argv[1], "give_up") == 0;
  versions_and_errors();
  uint8_t hash[LOCKSTEP_HASH_BYTES];
  OK(lockstep_blake3("abc", 3, hash));
  EXPECT(hash[0] == 0x64 && hash[1] == 0x37 && hash[31] == 0x85);

  lockstep_join_options options = {.size = sizeof(options)};
  options.transport = strcmp(argv[1], "shm") == 0 ? LOCKSTEP_SHM : LOCKSTEP_TCP;
  options.timeout_ms = 20000;
  options.survive = surviving || strcmp(argv[1], "give_up") == 0;
  lockstep_job* job = NULL;
  OK(lockstep_join(&options, &job));
  if (surviving) {
    survive(job, workers);
    lockstep_job_destroy(job);
    return 0;
  }
  const int rank = lockstep_job_rank(job);
  const int n = lockstep_job_world_size(job);
  lockstep_communicator* all = lockstep_job_communicator(job);
  EXPECT(lockstep_communicator_rank(all) == rank && lockstep_communicator_world_size(all) == n);
  EXPECT(lockstep_job_newcomer(job) == 0 && lockstep_job_departed_count(job) == 0);
  if (ending) {
    end_by_words(job, all, rank, argv[1], argv[2]);
    lockstep_job_destroy(job);
    return rank == 0 && strcmp(argv[1], "abort_fails") == 0;
  }
  other_versions(all);
  collectives(all, rank, n);
  messages(all, rank, n);
  groups(all, rank, n);
  lanes(job, all, rank, n);
  checkpoints(argv[2], rank);
  OK(lockstep_job_leave(job));
  lockstep_job_destroy(job);
  return 0;
}
