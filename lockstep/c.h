#ifndef LOCKSTEP_C_H
#define LOCKSTEP_C_H

/* Lockstep for programs in C and in every language that can call C. The shared library
 * liblockstep.so offers what is declared here and nothing else.
 *
 * Every function that can fail returns LOCKSTEP_OK (0), LOCKSTEP_NOT_YET, or the code of an error.
 * lockstep_last_error() then tells of it: code, rank at fault, text. No function hangs: a
 * collective ends by its deadline, which is the job's call_timeout_ms where none is given.
 *
 * Structures that may grow begin with `size`: set it to sizeof the structure, and everything that
 * is not used to zero (= {.size = sizeof(x)} does both). Later versions only add fields at the end;
 * a library that does not know a field refuses the call unless it is zero. Other structures and
 * functions never change, new ones are added; a program may ask for LOCKSTEP_ABI_VERSION.
 *
 * A handle is used by one thread at a time, unless its comment says more. Strings are UTF-8 and end
 * with a zero byte. Memory that is handed to a collective must stay where it is until the
 * collective has ended. docs/c_interface.md has an introduction and an example. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define LOCKSTEP_API __attribute__((visibility("default")))
#else
#define LOCKSTEP_API
#endif

/* ------------------------------------------------------------------ versions and errors */

#define LOCKSTEP_ABI_VERSION 3

/* That of the library which is loaded: it can serve programs that were compiled with the same
 * number or a lower one. */
LOCKSTEP_API uint32_t lockstep_abi_version(void);
LOCKSTEP_API const char* lockstep_version(void); /* "0.1.0" */

typedef enum lockstep_code {
  LOCKSTEP_OK = 0,
  LOCKSTEP_INVALID_ARGUMENT = 1,
  LOCKSTEP_INVALID_RANK = 2,
  LOCKSTEP_INVALID_WORLD_SIZE = 3,
  LOCKSTEP_SELF_SEND = 4,
  LOCKSTEP_NO_CONNECTION = 5,
  LOCKSTEP_SIZE_MISMATCH = 6,
  LOCKSTEP_TIMEOUT = 7,
  LOCKSTEP_CHANNEL_CLOSED = 8,
  LOCKSTEP_IO = 9,
  LOCKSTEP_PEER_LOST = 10,           /* a rank died, was stopped or is out of reach */
  LOCKSTEP_ABORTED = 11,             /* somebody called abort */
  LOCKSTEP_COLLECTIVE_MISMATCH = 12, /* ranks called different collectives */
  LOCKSTEP_NON_FINITE = 13,
  LOCKSTEP_AUTHENTICATION = 14,
  LOCKSTEP_VERSION_MISMATCH = 15,
  LOCKSTEP_UNEXPECTED_MESSAGE = 16,
  LOCKSTEP_MESSAGE_TOO_LARGE = 17,
  LOCKSTEP_STEP_MISMATCH = 18,
  LOCKSTEP_BLOCK_MISMATCH = 19,
  LOCKSTEP_COMPONENT_MISMATCH = 20,
  LOCKSTEP_REPLICA_MISMATCH = 21, /* workers hold different weights */
  LOCKSTEP_DEVICE = 22,           /* a GPU refused something */
  LOCKSTEP_INTERNAL = 99,         /* out of memory, or a bug */
  LOCKSTEP_NOT_YET = 100          /* no error: what was waited for has not ended */
} lockstep_code;

/* The code as it appears in messages, e.g. "size mismatch". Never null. */
LOCKSTEP_API const char* lockstep_code_name(int code);

typedef struct lockstep_error {
  size_t size;
  int code;
  int rank;         /* the rank of the job that is at fault; -1: none */
  const char* text; /* "peer lost: rank 2 (10.0.0.3:4711): ..." */
} lockstep_error;

/* What the last call of this thread that failed has to say. `text` is valid until the next call of
 * this thread that fails. Code LOCKSTEP_OK: none has failed. */
LOCKSTEP_API void lockstep_last_error(lockstep_error* error);

/* ------------------------------------------------------------------ jobs */

typedef struct lockstep_job lockstep_job;                   /* one worker's place in a job */
typedef struct lockstep_communicator lockstep_communicator; /* collectives among a group's ranks */
typedef struct lockstep_work lockstep_work;                 /* a collective that was started */
typedef struct lockstep_buffer lockstep_buffer;         /* memory where collectives are fastest */
typedef struct lockstep_lane_sum lockstep_lane_sum;     /* adds up the gradients of a step */
typedef struct lockstep_checkpoint lockstep_checkpoint; /* a checkpoint that is read */

typedef enum lockstep_transport {
  LOCKSTEP_AUTO = 0,  /* shared memory between workers of the same host, sockets otherwise */
  LOCKSTEP_TCP = 1,   /* always sockets */
  LOCKSTEP_SHM = 2,   /* always shared memory */
  LOCKSTEP_SERVER = 3 /* through a gradient server (lockstep coordinator) */
} lockstep_transport;

/* Times are in milliseconds. Zero, or null, is the default everywhere. */
typedef struct lockstep_join_options {
  size_t size;
  int transport; /* lockstep_transport */
  /* Nonzero: rank, size, place and secret are not taken from the environment (RANK, WORLD_SIZE,
   * MASTER_ADDR, MASTER_PORT and what Open MPI, MPICH, Slurm and `lockstep run` set), but from the
   * five fields below. */
  int no_environment;
  int rank;
  int world_size;          /* 0: this process alone */
  const char* master_host; /* where the workers meet: rank 0 listens there */
  uint16_t master_port;
  /* Nonzero: `listener` is a listening socket for rank 0, which lockstep_join takes over. */
  int has_listener;
  int listener;
  const char* coordinator;    /* HOST:PORT of the gradient server, with LOCKSTEP_SERVER */
  const char* name;           /* of the job; all workers say the same */
  const char* attempt;        /* names this start of it; all workers say the same */
  const char* token;          /* the job's secret, of 16 bytes at least; null: this host only */
  int plain_wire;             /* nonzero: bytes between hosts are checked, but not encrypted */
  const char* interface_name; /* the network interface to use */
  int64_t timeout_ms;         /* a worker that is silent for so long is dead; 30 s */
  int survive;                /* nonzero: the job goes on without workers that are lost */
  int min_workers;            /* with fewer it waits for others */
  int64_t patience_ms;        /* for so long; ten timeouts */
  int64_t call_timeout_ms;    /* of a collective without a timeout of its own; ten timeouts */
} lockstep_join_options;

/* Returns when all workers are there. `options` may be null. */
LOCKSTEP_API int lockstep_join(const lockstep_join_options* options, lockstep_job** job);
/* Waits for nobody. A worker that goes without lockstep_job_leave while others still work is lost
 * for them. Work handles and errors may outlive the job; nothing else may. Null is ignored. */
LOCKSTEP_API void lockstep_job_destroy(lockstep_job* job);

/* -1 for a newcomer (see below), who has neither. */
LOCKSTEP_API int lockstep_job_rank(const lockstep_job* job);
LOCKSTEP_API int lockstep_job_world_size(const lockstep_job* job);
/* The job's own communicator, which lives as long as the job. After lockstep_job_regroup the handle
 * stands for the group of the new generation. Null for a newcomer. */
LOCKSTEP_API lockstep_communicator* lockstep_job_communicator(lockstep_job* job);
/* The end in good order: waits for all workers. Nothing may follow but lockstep_job_destroy. */
LOCKSTEP_API int lockstep_job_leave(lockstep_job* job);
/* Ends the job for all workers at once. Callable from any thread. */
LOCKSTEP_API int lockstep_job_abort(lockstep_job* job, const char* reason);
/* This worker fails by itself: those that survive losses go on without it. Any thread. */
LOCKSTEP_API int lockstep_job_give_up(lockstep_job* job, const char* reason);
/* Writes what this worker did last to FOLDER/generation-N-TAG/rank-R.json, for `lockstep explain`.
 * Callable from any thread. */
LOCKSTEP_API int lockstep_job_write_flight(lockstep_job* job, const char* folder, const char* why);

/* ------------------------------------------------------------------ survival
 *
 * Ranks belong to a generation. When a worker is lost, every collective of the generation fails
 * with the same error. If lockstep_job_survives says so, each worker that is left calls
 * lockstep_job_regroup and goes on in the next generation, with other ranks, from the step that
 * all agree on. docs/survival.md explains it. */

/* 1 if the generation has ended because a worker was lost, which is what this error tells, and the
 * job goes on; else 0. */
LOCKSTEP_API int lockstep_job_survives(const lockstep_job* job, const lockstep_error* error);

typedef enum lockstep_regroup_how {
  LOCKSTEP_AFTER_LOSS = 0, /* the generation before has failed */
  LOCKSTEP_IN_ORDER = 1,   /* between two steps, as all workers know: somebody comes or leaves */
  LOCKSTEP_TOO_FEW = 2     /* as LOCKSTEP_IN_ORDER; this worker has saved and waits for others */
} lockstep_regroup_how;

/* Leaves the generation and returns in the next one. `step`: how many steps this worker has done.
 * Groups that were split off and buffers of the generation are destroyed before. */
LOCKSTEP_API int lockstep_job_regroup(lockstep_job* job, int64_t step, int how);
LOCKSTEP_API uint32_t lockstep_job_generation(const lockstep_job* job);
/* How many of the last ranks were in no generation before. */
LOCKSTEP_API int lockstep_job_newcomers(const lockstep_job* job);
/* 1 if this worker has come to a job that runs already. It has no communicator until
 * lockstep_job_regroup lets it in, and then needs the state of the others. */
LOCKSTEP_API int lockstep_job_newcomer(const lockstep_job* job);
LOCKSTEP_API int lockstep_job_too_few(const lockstep_job* job);
LOCKSTEP_API int lockstep_job_stood_still(const lockstep_job* job);

typedef enum lockstep_departure_kind {
  LOCKSTEP_DIED = 0,
  LOCKSTEP_FAILED = 1,
  LOCKSTEP_EXPELLED = 2,
  LOCKSTEP_LEFT = 3
} lockstep_departure_kind;

/* Who has gone since the generation before. The strings are valid until the next regroup. */
typedef struct lockstep_departure {
  size_t size;
  int rank; /* that it had there; -1: it was lost while a generation formed */
  int kind; /* lockstep_departure_kind */
  const char* name;
  const char* why;
} lockstep_departure;
LOCKSTEP_API size_t lockstep_job_departed_count(const lockstep_job* job);
LOCKSTEP_API int lockstep_job_departed(const lockstep_job* job, size_t index,
                                       lockstep_departure* departure);

/* What newcomers are told; all workers say the same. A job takes newcomers only once it is
 * described. More than `most_workers` wait outside; 0: any number. */
LOCKSTEP_API int lockstep_job_describe(lockstep_job* job, const void* bytes, size_t count,
                                       int most_workers);
/* What the job told this newcomer. Valid until the job is described or destroyed. */
LOCKSTEP_API int lockstep_job_description(const lockstep_job* job, const void** bytes,
                                          size_t* count);
/* What the job wants of its workers; rank 0 hears it first and passes it on to all. */
typedef struct lockstep_wishes {
  size_t size;
  int stop;    /* a signal's number: end in order */
  int save;    /* a checkpoint, once for each number that comes here; 0: none */
  int regroup; /* newcomers wait: LOCKSTEP_IN_ORDER after the step */
} lockstep_wishes;
LOCKSTEP_API int lockstep_job_wishes(const lockstep_job* job, lockstep_wishes* wishes);

/* ------------------------------------------------------------------ communicators */

/* Calls from several threads are taken one after another. */
LOCKSTEP_API int lockstep_communicator_rank(const lockstep_communicator* group);
LOCKSTEP_API int lockstep_communicator_world_size(const lockstep_communicator* group);
/* "rank 2 (10.0.0.3:4711)": writes at most `room` bytes, the final zero included. */
LOCKSTEP_API int lockstep_communicator_name_of(const lockstep_communicator* group, int rank,
                                               char* name, size_t room);
/* Ranks that give the same color form a group, ordered by key, then by rank. A negative color
 * joins none and gets null. Collective. Groups of a job fail together. */
LOCKSTEP_API int lockstep_communicator_split(lockstep_communicator* group, int color, int key,
                                             lockstep_communicator** part);
/* A group of `members`, ranks of this one in the order of their new ranks. Only they call it, with
 * the same arguments; no group of theirs has had this label before. Waits for nobody. */
LOCKSTEP_API int lockstep_communicator_subgroup(lockstep_communicator* group, const int* members,
                                                size_t count, const char* label,
                                                lockstep_communicator** part);
/* Of a group that was split off; that of a job is ignored, and null is. Never waits: collectives
 * that have not ended abort the job. */
LOCKSTEP_API void lockstep_communicator_destroy(lockstep_communicator* group);
/* Ends everything at once, on every rank of the job. Callable from any thread. */
LOCKSTEP_API int lockstep_communicator_abort(lockstep_communicator* group, const char* reason);
/* The job's first cause if it has failed; waits for nothing. Callable from any thread. */
LOCKSTEP_API int lockstep_communicator_check(const lockstep_communicator* group);

/* Zero-filled memory, 64-byte aligned. Where ranks share memory, collectives on it save two
 * copies. Destroyed before its communicator, and before lockstep_job_regroup. */
LOCKSTEP_API int lockstep_buffer_create(lockstep_communicator* group, size_t bytes,
                                        lockstep_buffer** buffer);
LOCKSTEP_API void* lockstep_buffer_data(lockstep_buffer* buffer);
LOCKSTEP_API void lockstep_buffer_destroy(lockstep_buffer* buffer);

/* ------------------------------------------------------------------ collectives
 *
 * All ranks of a group call the same collectives in the same order. A rank that does not is found
 * out and named. Messages between two ranks (send, recv) do not count in that order.
 *
 * Every call comes in one form, which ends at once or starts: with `work` null it returns when the
 * collective has ended; otherwise *work is a handle to wait for, and the collective runs on a
 * thread of the library. `count`s are elements; `counts` are per rank, null: equal parts. After a
 * failure the communicator is dead: what is pending and what comes later returns the same first
 * cause. Arguments that do not fit together are refused, and then nothing has been done. */

typedef enum lockstep_type {
  LOCKSTEP_F32 = 0,
  LOCKSTEP_F64 = 1,
  LOCKSTEP_F16 = 2,
  LOCKSTEP_BF16 = 3,
  LOCKSTEP_I32 = 4,
  LOCKSTEP_I64 = 5,
  LOCKSTEP_U8 = 6
} lockstep_type;
LOCKSTEP_API size_t lockstep_type_size(int type); /* in bytes; 0: no such type */

typedef enum lockstep_op {
  LOCKSTEP_SUM = 0,
  LOCKSTEP_MEAN = 1,
  LOCKSTEP_MIN = 2,
  LOCKSTEP_MAX = 3,
  LOCKSTEP_PRODUCT = 4
} lockstep_op;

typedef struct lockstep_call_options {
  size_t size;
  int64_t timeout_ms; /* for this call; 0: the job's call_timeout_ms */
  int check_finite;   /* nonzero: look for NaN and infinity in the result; see lockstep_outcome */
  uint32_t step;      /* both are named in errors, and compared between ranks */
  uint32_t bucket;
} lockstep_call_options;

/* data = the reduction of everybody's data. */
LOCKSTEP_API int lockstep_all_reduce(lockstep_communicator* group, void* data, size_t count,
                                     int type, int op, const lockstep_call_options* options,
                                     lockstep_work** work);
/* out = this rank's part of the reduction of everybody's `in`. */
LOCKSTEP_API int lockstep_reduce_scatter(lockstep_communicator* group, const void* in,
                                         size_t in_count, void* out, size_t out_count, int type,
                                         int op, const size_t* counts,
                                         const lockstep_call_options* options,
                                         lockstep_work** work);
/* out = everybody's `in` in rank order. `in` may be its own place in `out`. */
LOCKSTEP_API int lockstep_all_gather(lockstep_communicator* group, const void* in, size_t in_count,
                                     void* out, size_t out_count, int type, const size_t* counts,
                                     const lockstep_call_options* options, lockstep_work** work);
/* data = the root's data. */
LOCKSTEP_API int lockstep_broadcast(lockstep_communicator* group, void* data, size_t count,
                                    int type, int root, const lockstep_call_options* options,
                                    lockstep_work** work);
/* As all_reduce, to the root alone: `out` is used there only, and may be `in`. */
LOCKSTEP_API int lockstep_reduce(lockstep_communicator* group, const void* in, void* out,
                                 size_t count, int type, int op, int root,
                                 const lockstep_call_options* options, lockstep_work** work);
/* As all_gather, to the root alone: `out` is used there only. */
LOCKSTEP_API int lockstep_gather(lockstep_communicator* group, const void* in, size_t in_count,
                                 void* out, size_t out_count, int type, int root,
                                 const size_t* counts, const lockstep_call_options* options,
                                 lockstep_work** work);
/* The reverse of gather: `in` is used on the root alone. */
LOCKSTEP_API int lockstep_scatter(lockstep_communicator* group, const void* in, size_t in_count,
                                  void* out, size_t out_count, int type, int root,
                                  const size_t* counts, const lockstep_call_options* options,
                                  lockstep_work** work);
/* `in` holds a part for every rank, `out` receives one from every rank, both in rank order. */
LOCKSTEP_API int lockstep_all_to_all(lockstep_communicator* group, const void* in, size_t in_count,
                                     void* out, size_t out_count, int type,
                                     const size_t* send_counts, const size_t* recv_counts,
                                     const lockstep_call_options* options, lockstep_work** work);
/* Ends when every rank has called it. */
LOCKSTEP_API int lockstep_barrier(lockstep_communicator* group,
                                  const lockstep_call_options* options, lockstep_work** work);

/* A message to another rank. Messages from one rank to another arrive in the order in which they
 * were sent; one whose type, count or tag is not what its receiver expects ends the job with an
 * error that names the sender. A large message waits for its receiver. */
LOCKSTEP_API int lockstep_send(lockstep_communicator* group, const void* data, size_t count,
                               int type, int to, uint32_t tag, const lockstep_call_options* options,
                               lockstep_work** work);
LOCKSTEP_API int lockstep_recv(lockstep_communicator* group, void* data, size_t count, int type,
                               int from, uint32_t tag, const lockstep_call_options* options,
                               lockstep_work** work);
/* Receives the next message of any rank that has this tag; lockstep_outcome tells whose it was. Of
 * several receives that a message fits, the one that was called first gets it; one from a named
 * rank fits all messages of that rank. Since version 2. */
LOCKSTEP_API int lockstep_recv_any(lockstep_communicator* group, void* data, size_t count, int type,
                                   uint32_t tag, const lockstep_call_options* options,
                                   lockstep_work** work);

typedef struct lockstep_outcome {
  size_t size;
  /* With check_finite: the first element of the result on this rank that is NaN or infinite; -1:
   * all are finite. */
  int64_t first_non_finite;
  int64_t took_ns; /* how long the collective took, once all work before it had ended */
  int source;      /* of lockstep_recv_any: who sent the message; otherwise -1. Since version 2 */
} lockstep_outcome;

/* LOCKSTEP_OK when the collective has ended, LOCKSTEP_NOT_YET if it has not after `timeout_ms` (0:
 * do not wait; negative: until its own deadline), or its error. Returns as soon as it ends.
 * `outcome` may be null. Several threads may wait for the same work. */
LOCKSTEP_API int lockstep_work_wait(lockstep_work* work, int64_t timeout_ms,
                                    lockstep_outcome* outcome);
/* 1 if the collective has ended, well or not; else 0. */
LOCKSTEP_API int lockstep_work_done(const lockstep_work* work);
/* Does not stop the collective: its memory stays in use until it has ended. Null is ignored. */
LOCKSTEP_API void lockstep_work_destroy(lockstep_work* work);

/* ------------------------------------------------------------------ sums over lanes
 *
 * A step has V lanes, and the sum over them is taken in one fixed tree, so that it has the same
 * bits for any number of workers: T(a, b) is lane a if b - a = 1, else T(a, a + p) + T(a + p, b),
 * with p the largest power of two below b - a. Rank r of W computes the lanes [r V / W, (r + 1) V /
 * W). What it can add up alone are the largest nodes of the tree within them, its partials. The
 * rest is lockstep_reduce_nodes. */

/* The lanes of a rank: [*begin, *end). */
LOCKSTEP_API int lockstep_lanes_of(uint32_t lanes, int world_size, int rank, uint32_t* begin,
                                   uint32_t* end);

typedef struct lockstep_range {
  uint64_t begin;
  uint64_t end;
} lockstep_range;
/* The partials of a rank as ranges of lanes, in lane order: at most `room` are written, *count says
 * how many there are. `nodes` may be null if room is 0. */
LOCKSTEP_API int lockstep_partials_of(uint32_t lanes, int world_size, int rank,
                                      lockstep_range* nodes, size_t room, size_t* count);

/* In which order a rank best computes its lanes, so that it needs few accumulators (memory of the
 * size of the gradient). A program: for every lane, compute its gradient into an accumulator, then
 * carry out its merges, accumulator `into` += accumulator `from`. At the end partial i is in
 * accumulator i. */
typedef struct lockstep_lane_step {
  uint32_t lane;
  uint32_t accumulator; /* gets the gradient of the lane, whatever was in it */
  uint32_t first_merge; /* its merges: [first_merge, first_merge + merges) of the list of merges */
  uint32_t merges;
} lockstep_lane_step;
typedef struct lockstep_merge {
  uint32_t into;
  uint32_t from;
} lockstep_merge;
/* Both arrays have room for as many elements as the rank has lanes. */
LOCKSTEP_API int lockstep_lane_schedule(uint32_t lanes, int world_size, int rank,
                                        lockstep_lane_step* steps, size_t* step_count,
                                        lockstep_merge* merges, size_t* merge_count,
                                        uint32_t* accumulators);

/* into[i] += from[i], with the arithmetic of all our sums: f16 and bf16 are added in f32 and
 * rounded to nearest even, a NaN that is computed is the canonical one, integers wrap. */
LOCKSTEP_API int lockstep_accumulate(void* into, const void* from, size_t count, int type);
/* The index of the first NaN or infinity, or `count`. */
LOCKSTEP_API size_t lockstep_find_non_finite(const void* data, size_t count, int type);

/* out = the sum over all lanes. `partials` are this rank's, in the order of lockstep_partials_of,
 * each of `count` elements; `out` may be the first of them. Any range of a gradient can be summed
 * by itself: the bits of an element depend on its lanes alone. */
LOCKSTEP_API int lockstep_reduce_nodes(lockstep_communicator* group, const void* const* partials,
                                       size_t partial_count, uint32_t lanes, void* out,
                                       size_t count, int type, const lockstep_call_options* options,
                                       lockstep_work** work);

/* The same for a gradient of f32 as one object, with the accumulators, the buckets and what
 * travels while others are still computed. In every step: begin; for every own lane, in their
 * order, fill its gradient and call ready as ranges of it are final; numbers; finish. It goes on
 * across generations of the job, where it shares the lanes anew. `numbers` are f64 numbers (losses,
 * counts) that are summed beside the gradient, in the same tree.
 * `bucket_bytes` is what travels at once; 0: 4 MiB. */
LOCKSTEP_API int lockstep_lane_sum_create(lockstep_job* job, uint32_t lanes, size_t elements,
                                          size_t numbers, size_t bucket_bytes,
                                          lockstep_lane_sum** sum);
LOCKSTEP_API void lockstep_lane_sum_destroy(lockstep_lane_sum* sum);
/* How many lanes this worker has in this generation, and which the index-th to compute is. */
LOCKSTEP_API int lockstep_lane_sum_count(lockstep_lane_sum* sum, size_t* own_lanes);
LOCKSTEP_API int lockstep_lane_sum_lane(lockstep_lane_sum* sum, size_t index, uint32_t* lane);
/* Collective, as all that follows: the same step everywhere. */
LOCKSTEP_API int lockstep_lane_sum_begin(lockstep_lane_sum* sum, int64_t step);
/* Where the gradient of the index-th lane goes, `elements` of f32, filled with what was there
 * before, and its `numbers`, which are zeros. Valid until the generation ends; may be written once
 * all lanes before it are ready. */
LOCKSTEP_API int lockstep_lane_sum_gradient(lockstep_lane_sum* sum, size_t index, float** gradient,
                                            double** numbers);
/* Elements [begin, end) of that gradient are final. Ranges of a lane come in ascending order
 * without gaps. A range that is final in the last lane begins to travel. */
LOCKSTEP_API int lockstep_lane_sum_ready(lockstep_lane_sum* sum, size_t index, size_t begin,
                                         size_t end);
/* All is final. LOCKSTEP_NOT_YET if the gradient has not come after `timeout_ms` (negative: until
 * the deadline of the collectives): call it again. Then *gradient is the sum over all lanes and
 * `numbers` has the sums of the numbers. The gradient is valid, and may be changed, until the next
 * begin. */
LOCKSTEP_API int lockstep_lane_sum_finish(lockstep_lane_sum* sum, int64_t timeout_ms,
                                          float** gradient, double* numbers);

/* ------------------------------------------------------------------ hashes */

#define LOCKSTEP_HASH_BYTES 32

/* BLAKE3. */
LOCKSTEP_API int lockstep_blake3(const void* data, size_t bytes, uint8_t hash[LOCKSTEP_HASH_BYTES]);
/* BLAKE3 of the hashes of `count` pieces of memory, in their order; hashed on several threads. */
LOCKSTEP_API int lockstep_blake3_many(const void* const* data, const size_t* bytes, size_t count,
                                      uint8_t hash[LOCKSTEP_HASH_BYTES]);

/* ------------------------------------------------------------------ checkpoints
 *
 * A checkpoint is a folder that appears complete or not at all: model.safetensors, metadata.bin
 * and manifest.json, which has the BLAKE3 of both files and of every tensor. */

typedef struct lockstep_tensor {
  size_t size;
  const char* name;
  const char* type; /* as safetensors calls it: "F32", "F64", "F16", "BF16", "I64", "BOOL", ... */
  const int64_t* shape;
  size_t dimensions;
  void* data; /* written by lockstep_checkpoint_read, only read by lockstep_checkpoint_save */
  size_t bytes;
} lockstep_tensor;

/* Writes the folder `path`, whose parent must exist, as one worker does it for all. An existing
 * folder is refused. Metadata are any bytes. */
LOCKSTEP_API int lockstep_checkpoint_save(const char* path, int64_t step,
                                          const lockstep_tensor* tensors, size_t count,
                                          const void* metadata, size_t metadata_bytes);
/* Reads manifest, metadata and the list of tensors, and checks their hashes. */
LOCKSTEP_API int lockstep_checkpoint_open(const char* path, lockstep_checkpoint** checkpoint);
LOCKSTEP_API void lockstep_checkpoint_destroy(lockstep_checkpoint* checkpoint);
LOCKSTEP_API int64_t lockstep_checkpoint_step(const lockstep_checkpoint* checkpoint);
LOCKSTEP_API int lockstep_checkpoint_metadata(const lockstep_checkpoint* checkpoint,
                                              const void** bytes, size_t* count);
LOCKSTEP_API size_t lockstep_checkpoint_count(const lockstep_checkpoint* checkpoint);
/* All fields but `data`; valid as long as the checkpoint. */
LOCKSTEP_API int lockstep_checkpoint_tensor(const lockstep_checkpoint* checkpoint, size_t index,
                                            lockstep_tensor* tensor);
/* Reads all tensors: data[i] has room for tensor i; null: it is only checked. Fails if the hash of
 * anything is not that of the manifest. */
LOCKSTEP_API int lockstep_checkpoint_read(const lockstep_checkpoint* checkpoint, void* const* data);

#ifdef __cplusplus
}
#endif

#endif
