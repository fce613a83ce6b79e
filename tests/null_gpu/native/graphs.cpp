// Stream capture with CUDA's rules, and graphs: their kernels do nothing, their copies are made at every launch.
#include "core.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>

#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef std::lock_guard<std::recursive_mutex> Lock;

static std::atomic<int> num_captures{0};
static thread_local int thread_mode = GLOBAL;

static std::recursive_mutex& guard() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}
static std::vector<Capture*>& captures() {
  static auto* all = new std::vector<Capture*>;
  return *all;
}
static uint64_t this_thread() { return (uint64_t)syscall(SYS_gettid); }
static bool is_legacy(void* handle) { return (uintptr_t)handle <= 1; }

// The capture with a stream that waits for the legacy stream, if there is one.
static Capture* blocking_capture() {
  for (Capture* capture : captures())
    for (Stream* stream : capture->streams)
      if (!(stream->flags & STREAM_NON_BLOCKING)) return capture;
  return nullptr;
}

extern "C" {
int ng_is_capturing() { return num_captures.load(std::memory_order_relaxed); }

void ng_illegal(const char* who) {
  COUNT("illegal");
  ng_count((std::string("illegal:") + who).c_str(), 1);
  ng_event(ILLEGAL, who, 0);
  ng_log("illegal during stream capture: %s", who);
}

int ng_unsafe(const char* who) {
  if (!ng_is_capturing() || thread_mode == RELAXED) return 0;
  Lock lock(guard());
  bool is_refused = false;
  for (Capture* capture : captures()) {
    bool is_own = capture->thread == this_thread() && capture->mode != RELAXED;
    if (is_own || (thread_mode == GLOBAL && capture->mode == GLOBAL)) capture->is_invalid = is_refused = true;
  }
  if (!is_refused) return 0;
  ng_illegal(who);
  return CAPTURE_UNSUPPORTED;
}

int ng_enter(void* handle, NodeKind kind, const char* name, Node** node) {
  Stream* stream = ng_stream(handle);
  if (!stream) return INVALID_HANDLE;
  if (!ng_is_capturing()) return 0;
  Lock lock(guard());
  if (Capture* capture = stream->capture) {
    if (capture->is_invalid) return CAPTURE_INVALIDATED;
    *node = new Node{kind, name, 0, stream->tails};
    for (Node* dependency : stream->tails) dependency->num_children++;
    stream->tails = {*node};
    capture->graph->nodes.push_back(*node);
    return -1;
  }
  if (is_legacy(handle))
    if (Capture* capture = blocking_capture()) {
      capture->is_invalid = true;
      ng_illegal("work on the legacy stream");
      return CAPTURE_IMPLICIT;
    }
  for (Capture* capture : captures())
    if (capture->thread == this_thread()) {  // legal, but hardly meant: the graph will lack it
      COUNT("uncaptured");
      ng_count((std::string("uncaptured:") + name).c_str(), 1);
    }
  return 0;
}

Capture* ng_find_capture(uint64_t id) {
  if (!id) return nullptr;
  Lock lock(guard());
  for (Capture* capture : captures())
    if (capture->id == id) return capture;
  return nullptr;
}

int ng_begin_capture(void* handle, int mode, Graph* into) {
  static std::atomic<uint64_t> next_id{1};
  Stream* stream = ng_stream(handle);
  if (!stream) return INVALID_HANDLE;
  if (is_legacy(handle)) return CAPTURE_UNSUPPORTED;
  Lock lock(guard());
  if (stream->capture) {
    ng_illegal("a second cudaStreamBeginCapture");
    return CAPTURE_UNSUPPORTED;
  }
  ng_event(GRAPH, "cudaStreamBeginCapture", 0);
  auto* capture = new Capture{next_id++, mode, this_thread(), stream, {stream}, into ? into : new Graph, false};
  stream->capture = capture;
  stream->tails.clear();
  captures().push_back(capture);
  num_captures++;
  return 0;
}

static int check_end(Capture* capture, Stream* stream) {
  if (capture->is_invalid) return CAPTURE_INVALIDATED;
  if (capture->origin != stream) return CAPTURE_UNMATCHED;
  if (capture->thread != this_thread() && capture->mode != RELAXED) return CAPTURE_WRONG_THREAD;
  for (Node* node : capture->graph->nodes) {
    bool is_joined = node->num_children || std::count(stream->tails.begin(), stream->tails.end(), node);
    if (!is_joined) {
      ng_illegal((std::string("a forked stream was not joined, its last work is ") + node->name).c_str());
      return CAPTURE_UNJOINED;
    }
  }
  return 0;
}

int ng_end_capture(void* handle, Graph** graph) {
  Stream* stream = ng_stream(handle);
  if (!stream) return INVALID_HANDLE;
  Lock lock(guard());
  Capture* capture = stream->capture;
  if (!capture) return ILLEGAL_STATE;
  int error = check_end(capture, stream);
  for (Stream* member : capture->streams) {
    member->capture = nullptr;
    member->tails.clear();
  }
  captures().erase(std::find(captures().begin(), captures().end(), capture));
  num_captures--;
  *graph = error ? nullptr : capture->graph;
  delete capture;
  return error;
}

int ng_capture_info(void* handle, int* status, uint64_t* id, Graph** graph, Node*** dependencies, size_t* count) {
  Stream* stream = ng_stream(handle);
  if (!stream) return INVALID_HANDLE;
  *status = 0;
  if (!ng_is_capturing()) return 0;
  Lock lock(guard());
  if (is_legacy(handle) && blocking_capture()) return CAPTURE_IMPLICIT;
  Capture* capture = stream->capture;
  if (!capture) return 0;
  *status = capture->is_invalid ? 2 : 1;
  if (id) *id = capture->id;
  if (graph) *graph = capture->graph;
  if (dependencies) *dependencies = stream->tails.data();
  if (count) *count = stream->tails.size();
  return 0;
}

int ng_set_dependencies(void* handle, Node** dependencies, size_t count, int replaces) {
  Stream* stream = ng_stream(handle);
  if (!stream || !stream->capture) return ILLEGAL_STATE;
  Lock lock(guard());
  if (replaces) stream->tails.clear();
  stream->tails.insert(stream->tails.end(), dependencies, dependencies + count);
  return 0;
}

int ng_exchange_mode(int* mode) {
  std::swap(thread_mode, *mode);
  return 0;
}

int ng_graph_launch(Graph* graph, void* handle) {
  Node* node = nullptr;
  int entered = ng_enter(handle, OTHER_NODE, "graph", &node);
  if (entered == -1) COUNT("captured.graph");
  if (entered) return entered == -1 ? 0 : entered;
  COUNT("graph.launch");
  ng_event(GRAPH, "cudaGraphLaunch", graph->nodes.size());
  uint64_t num_kernels = 0;
  for (Node* part : graph->nodes) {
    if (part->kind == KERNEL_NODE) {
      num_kernels++;
      ng_event(REPLAY, part->name, 0);
    }
    ng_run_node(part);
  }
  COUNT_N("graph.kernels", num_kernels);
  return 0;
}
}
