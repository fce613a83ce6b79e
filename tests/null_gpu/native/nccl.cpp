// libnccl.so.2: collectives between processes through shared memory. They are made at once, on the host, by real waits:
// what would hang on a device (a rank that skips a collective, or calls another one) is an error that names the rank.
#include "core.h"

#include <atomic>
#include <string>

#include <fcntl.h>
#include <random>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const int MAX_RANKS = 8;
static const size_t CHUNK = 1 << 20;
enum { SUCCESS, UNHANDLED_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR };
enum DataType { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
static const int SUM = 0;  // ncclRedOp_t

struct UniqueId {
  char name[128];
};
struct Call {  // what a rank is about to do; all ranks have to agree
  char name[24];
  size_t bytes;
};
struct Board {                               // shared by the ranks of a communicator
  std::atomic<uint64_t> arrived[MAX_RANKS];  // barriers that each rank has reached
  Call calls[MAX_RANKS];
  char data[MAX_RANKS][CHUNK];
};
struct Communicator {
  int rank, num_ranks, device, error;
  uint64_t num_barriers;
  Board* board;
  std::string name;
};

static double timeout_s() {
  static const double seconds = ng_setting("NULLGPU_NCCL_TIMEOUT_S", 60);
  return seconds;
}

static int complain(Communicator* comm, const std::string& text) {
  COUNT("nccl.error");
  fprintf(stderr, "[null GPU] NCCL, rank %d of %d: %s\n", comm->rank, comm->num_ranks, text.c_str());
  return comm->error = REMOTE_ERROR;
}

// Wait until all ranks are here.
static int barrier(Communicator* comm, const char* what) {
  uint64_t mine = ++comm->num_barriers;
  comm->board->arrived[comm->rank].store(mine);
  double end = ng_now() + timeout_s();
  for (int other = 0; other < comm->num_ranks; other++)
    for (int spins = 0; comm->board->arrived[other].load() < mine; spins++) {
      if (spins > 100) sched_yield();
      if (ng_now() > end)
        return complain(comm, std::string(what) + ": rank " + std::to_string(other) + " did not come within " +
                                  std::to_string((int)timeout_s()) + " s");
    }
  return SUCCESS;
}

// Agree on the call before any data is exchanged.
static int agree(Communicator* comm, const char* name, size_t bytes) {
  if (comm->error) return comm->error;
  Call& own = comm->board->calls[comm->rank];
  snprintf(own.name, sizeof own.name, "%s", name);
  own.bytes = bytes;
  if (int error = barrier(comm, name)) return error;
  for (int other = 0; other < comm->num_ranks; other++) {
    const Call& theirs = comm->board->calls[other];
    if (strcmp(theirs.name, name) || theirs.bytes != bytes)
      return complain(comm, std::string(name) + " of " + std::to_string(bytes) + " bytes, but rank " +
                                std::to_string(other) + " calls " + theirs.name + " of " +
                                std::to_string(theirs.bytes));
  }
  return SUCCESS;
}

// Let every rank see `bytes` of every rank, a chunk at a time: `use(rank, data, offset, bytes)`.
template <class Use>
static int exchange(Communicator* comm, const char* name, const void* send, size_t bytes, Use use) {
  if (int error = agree(comm, name, bytes)) return error;
  for (size_t offset = 0; offset < bytes; offset += CHUNK) {
    size_t part = bytes - offset < CHUNK ? bytes - offset : CHUNK;
    memcpy(comm->board->data[comm->rank], (const char*)send + offset, part);
    if (int error = barrier(comm, name)) return error;
    for (int rank = 0; rank < comm->num_ranks; rank++) use(rank, comm->board->data[rank], offset, part);
    if (int error = barrier(comm, name)) return error;
  }
  return SUCCESS;
}

static size_t width_of(int type) {
  static const size_t WIDTHS[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type <= BFLOAT16 ? WIDTHS[type] : 1;
}

struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  Bfloat16& operator=(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    return *this;
  }
};

template <class T>
static bool add(void* out, const void* in, size_t count) {
  for (size_t i = 0; i < count; i++) ((T*)out)[i] = ((T*)out)[i] + ((const T*)in)[i];
  return true;
}

// Add what engines add; false for any other type.
static bool add_any(void* out, const void* in, size_t count, int type) {
  switch (type) {
    case INT32: return add<int32_t>(out, in, count);
    case INT64: return add<int64_t>(out, in, count);
    case FLOAT16: return add<_Float16>(out, in, count);
    case FLOAT32: return add<float>(out, in, count);
    case BFLOAT16: return add<Bfloat16>(out, in, count);
    default: return false;
  }
}

// ---- the collectives, on host and device memory alike

struct Collective {
  int (*make)(const Collective&);
  const void* send;
  void* receive;
  size_t count;
  int type, op, root;
  Communicator* comm;
};

static int all_reduce(const Collective& c) {
  size_t width = width_of(c.type);
  std::string sum(c.count * width, 0);
  bool is_known = c.op == SUM;
  int error =
      exchange(c.comm, "ncclAllReduce", c.send, sum.size(), [&](int rank, char* data, size_t offset, size_t part) {
        if (rank == 0)
          memcpy(&sum[offset], data, part);
        else
          is_known &= add_any(&sum[offset], data, part / width, c.type);
      });
  if (!error && !is_known) error = complain(c.comm, "ncclAllReduce that is no sum, or of a type that is not added here");
  if (!error) memcpy(c.receive, sum.data(), sum.size());
  return error;
}
static int all_gather(const Collective& c) {
  size_t bytes = c.count * width_of(c.type);
  std::string all(bytes * c.comm->num_ranks, 0);
  int error = exchange(c.comm, "ncclAllGather", c.send, bytes, [&](int rank, char* data, size_t offset, size_t part) {
    memcpy(&all[rank * bytes + offset], data, part);
  });
  if (!error) memcpy(c.receive, all.data(), all.size());
  return error;
}
static int broadcast(const Collective& c) {
  size_t bytes = c.count * width_of(c.type);
  std::string data(bytes, 0);
  const void* send = c.comm->rank == c.root ? c.send : data.data();
  return exchange(c.comm, "ncclBroadcast", send, bytes, [&](int rank, char* from, size_t offset, size_t part) {
    if (rank == c.root) memcpy((char*)c.receive + offset, from, part);
  });
}

static void replay(void* argument) {
  auto* collective = (Collective*)argument;
  collective->make(*collective);
}

// One kernel of a stream; what a graph captures is made at every launch of the graph.
static int submit(const Collective& collective, void* stream, const char* name) {
  Node* node = nullptr;
  int entered = ng_enter(stream, HOST_NODE, name, &node);
  if (entered > 0) return UNHANDLED_ERROR;
  if (entered == -1) {
    COUNT("captured.nccl");
    node->function = replay, node->argument = new Collective(collective);
    return SUCCESS;
  }
  COUNT("launch");
  COUNT("launch.nccl");
  ng_count((std::string("kernel:") + name).c_str(), 1);
  ng_event(LAUNCH, name, 0);
  return collective.make(collective);
}

extern "C" {
int ncclGetVersion(int* version) { return (*version = 22907, SUCCESS); }
const char* ncclGetErrorString(int error) {
  return error == REMOTE_ERROR ? "remote process error" : "null GPU's NCCL error";
}
const char* ncclGetLastError(void*) { return "see standard error"; }
int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  snprintf(id->name, sizeof id->name, "/nullgpu-%08x%08x-%d", random(), random(), (int)getpid());
  return SUCCESS;
}

int ncclCommInitRank(Communicator** out, int num_ranks, UniqueId id, int rank) {
  if (num_ranks > MAX_RANKS) return INVALID_ARGUMENT;
  int file = shm_open(id.name, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Board))) return SYSTEM_ERROR;
  void* board = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (board == MAP_FAILED) return SYSTEM_ERROR;
  auto* comm = new Communicator{rank, num_ranks, ng_device(), SUCCESS, 0, (Board*)board, id.name};
  *out = comm;
  int error = barrier(comm, "ncclCommInitRank");
  if (rank == 0) shm_unlink(id.name);  // all have it, and nothing stays behind
  return error;
}
int ncclCommInitRankConfig(Communicator** out, int num_ranks, UniqueId id, int rank, void*) {
  return ncclCommInitRank(out, num_ranks, id, rank);
}
int ncclCommInitRankScalable(Communicator** out, int num_ranks, int rank, int, UniqueId* ids, void*) {
  return ncclCommInitRank(out, num_ranks, ids[0], rank);
}
int ncclCommDestroy(Communicator* comm) {
  munmap(comm->board, sizeof(Board));
  delete comm;
  return SUCCESS;
}
int ncclCommAbort(Communicator* comm) { return ncclCommDestroy(comm); }
int ncclCommCount(Communicator* comm, int* count) { return (*count = comm->num_ranks, SUCCESS); }
int ncclCommUserRank(Communicator* comm, int* rank) { return (*rank = comm->rank, SUCCESS); }
int ncclCommGetAsyncError(Communicator* comm, int* error) { return (*error = comm->error, SUCCESS); }
int ncclMemAlloc(void**, size_t) { return INVALID_USAGE; }

int ncclAllReduce(const void* send, void* receive, size_t count, int type, int op, Communicator* comm, void* stream) {
  return submit({all_reduce, send, receive, count, type, op, 0, comm}, stream, "ncclAllReduce");
}
int ncclAllGather(const void* send, void* receive, size_t count, int type, Communicator* comm, void* stream) {
  return submit({all_gather, send, receive, count, type, 0, 0, comm}, stream, "ncclAllGather");
}
int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, Communicator* comm, void* stream) {
  return submit({broadcast, send, receive, count, type, 0, root, comm}, stream, "ncclBroadcast");
}
int ncclBcast(void* data, size_t count, int type, int root, Communicator* comm, void* stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
// What vLLM uses between pipeline stages only, or not at all.
int ncclReduce(const void*, void*, size_t, int, int, int, Communicator*, void*) { return INVALID_USAGE; }
int ncclReduceScatter(const void*, void*, size_t, int, int, Communicator*, void*) { return INVALID_USAGE; }
int ncclSend(const void*, size_t, int, int, Communicator*, void*) { return INVALID_USAGE; }
int ncclRecv(void*, size_t, int, int, Communicator*, void*) { return INVALID_USAGE; }
int ncclCommSplit(Communicator*, int, int, Communicator**, void*) { return INVALID_USAGE; }
}
