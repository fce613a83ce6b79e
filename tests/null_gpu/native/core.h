// The book-keeping that the stub driver and the stub libraries above it share; it lives in libcuda.so.1.
//
// Functions return CUDA's error codes (the driver's and the runtime's have the same numbers), 0 for success.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <vector>

// What a trace can ask for.
enum Category { SYNC, COPY, ALLOC, LAUNCH, ILLEGAL, GRAPH, REPLAY };
enum NodeKind { KERNEL_NODE, MEMCPY_NODE, MEMSET_NODE, HOST_NODE, OTHER_NODE };
enum MemoryKind { PAGEABLE, PINNED, DEVICE };
// cudaStreamCaptureMode; also what a thread forbids itself while anyone captures.
enum CaptureMode { GLOBAL, THREAD_LOCAL, RELAXED };
enum {
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_CONFIGURATION = 9,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_HANDLE = 400,
  ILLEGAL_STATE = 401,
  NOT_FOUND = 500,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_MERGE = 902,
  CAPTURE_UNMATCHED = 903,
  CAPTURE_UNJOINED = 904,
  CAPTURE_ISOLATION = 905,
  CAPTURE_IMPLICIT = 906,
  CAPTURED_EVENT = 907,
  CAPTURE_WRONG_THREAD = 908,
};
const int CAPABILITY = 90;  // an H100's, 9.0
const unsigned STREAM_NON_BLOCKING = 1;

struct Node {
  NodeKind kind;
  const char* name;
  int num_children;
  std::vector<Node*> dependencies;
  void* dst;
  const void* src;
  size_t bytes;
  int value;
  size_t width;  // bytes of one element of a memset
  void (*function)(void*);
  void* argument;
};
struct Graph {
  std::vector<Node*> nodes;
};
struct Capture;
struct Stream {
  uint32_t magic;
  int device;
  unsigned flags;
  int priority;
  Capture* capture;
  std::vector<Node*> tails;  // what the next captured node depends on
};
struct Event {
  unsigned flags;
  uint64_t capture_id;  // of the capture it was last recorded in, 0 outside
  std::vector<Node*> tails;
  double seconds;
  bool is_recorded;
};
struct Capture {
  uint64_t id;
  int mode;
  uint64_t thread;
  Stream* origin;
  std::vector<Stream*> streams;
  Graph* graph;
  bool is_invalid;
};

extern "C" {
// ---- counters.cpp
int ng_counter(const char* name);  // the id of a named counter
void ng_add(int id, uint64_t value);
void ng_count(const char* name, uint64_t value);  // for names that are not constant
void ng_event(int category, const char* name, size_t bytes);
int ng_stub(const char* name);  // an entry point without a body of its own was called: counted, success
void ng_log(const char* format, ...);
long ng_setting(const char* name, long otherwise);
double ng_now();  // s

// ---- memory.cpp
int ng_num_devices();
size_t ng_total_bytes();  // of one device
int ng_device();
int ng_set_device(int device);
int ng_malloc(void** pointer, size_t bytes, const char* who);
int ng_free(void* pointer, const char* who);
int ng_host_alloc(void** pointer, size_t bytes, const char* who);
int ng_host_free(void* pointer, const char* who);
int ng_host_register(void* pointer, size_t bytes);
int ng_host_unregister(void* pointer);
void* ng_reserve(size_t bytes);  // addresses of device memory, not counted as used
int ng_unreserve(void* pointer);
int ng_use(int device, size_t bytes);  // count memory as used that gets its address later
void ng_unuse(int device, size_t bytes);
void ng_discard(void* pointer, size_t bytes);                                    // let it read as zeros
int ng_where(const void* pointer, int* device, uintptr_t* base, size_t* bytes);  // a MemoryKind
size_t ng_free_bytes(int device);

// ---- streams.cpp
Stream* ng_stream(void* handle);
void* ng_stream_create(unsigned flags, int priority);
int ng_stream_destroy(void* handle);
int ng_stream_synchronize(void* handle);
int ng_stream_query(void* handle);
int ng_stream_wait(void* handle, Event* event);
int ng_device_synchronize();
Event* ng_event_create(unsigned flags);
int ng_event_record(Event* event, void* stream);
int ng_event_query(Event* event);
int ng_event_synchronize(Event* event);
float ng_elapsed_ms(Event* begin, Event* end);

// ---- graphs.cpp
// A call that is not allowed while this thread, or in the global mode any thread, captures.
int ng_unsafe(const char* who);
void ng_illegal(const char* who);
int ng_is_capturing();  // whether anyone captures
// 0: run it now; -1: it was captured, as `*node`; else an error.
int ng_enter(void* stream, NodeKind kind, const char* name, Node** node);
Capture* ng_find_capture(uint64_t id);
int ng_begin_capture(void* stream, int mode, Graph* into);
int ng_end_capture(void* stream, Graph** graph);
int ng_capture_info(void* stream, int* status, uint64_t* id, Graph** graph, Node*** dependencies, size_t* count);
int ng_set_dependencies(void* stream, Node** dependencies, size_t count, int replaces);
int ng_exchange_mode(int* mode);
int ng_graph_launch(Graph* graph, void* stream);

// ---- copies.cpp
int ng_launch(void* stream, const char* api, const char* kernel);
int ng_check_grid(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, const char* kernel);
int ng_memcpy(void* dst, const void* src, size_t bytes, void* stream, int is_blocking, const char* who);
int ng_memset(void* dst, int value, size_t width, size_t bytes, void* stream, int is_blocking, const char* who);
int ng_host_function(void* stream, void (*function)(void*), void* argument);
void ng_run_node(Node* node);

// ---- driver.cpp
int ng_device_attribute(int attribute, int device);
}

#define COUNT_N(name, value)           \
  do {                                 \
    static int id_ = ng_counter(name); \
    ng_add(id_, (value));              \
  } while (0)
#define COUNT(name) COUNT_N(name, 1)
