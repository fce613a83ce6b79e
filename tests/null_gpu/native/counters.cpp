// Named counters, the trace callback, settings from the environment.
#include "core.h"

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void (*Callback)(int category, const char* name, size_t bytes);

static const int MAX_COUNTERS = 8192;
static std::atomic<uint64_t> values[MAX_COUNTERS];
static char* names[MAX_COUNTERS];
static int num_counters = 0;
static Callback callback = nullptr;
static unsigned callback_mask = 0;

// Never destroyed: CUDA's libraries call in while the process ends.
static std::mutex& guard() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
static std::unordered_map<std::string, int>& ids() {
  static auto* map = new std::unordered_map<std::string, int>;
  return *map;
}

extern "C" {
long ng_setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

double ng_now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

int ng_counter(const char* name) {
  std::lock_guard<std::mutex> lock(guard());
  auto found = ids().find(name);
  if (found != ids().end()) return found->second;
  if (num_counters == MAX_COUNTERS) {
    fprintf(stderr, "[null GPU] more than %d counters\n", MAX_COUNTERS);
    abort();
  }
  names[num_counters] = strdup(name);
  ids()[name] = num_counters;
  return num_counters++;
}

void ng_add(int id, uint64_t value) { values[id].fetch_add(value, std::memory_order_relaxed); }

void ng_count(const char* name, uint64_t value) { ng_add(ng_counter(name), value); }

// Writes "value name\n" lines of all counters that are not zero; returns the bytes that they take.
size_t ng_snapshot(char* buffer, size_t capacity) {
  std::lock_guard<std::mutex> lock(guard());
  std::string text;
  for (int i = 0; i < num_counters; i++)
    if (uint64_t value = values[i].load()) text += std::to_string(value) + " " + names[i] + "\n";
  if (text.size() < capacity) memcpy(buffer, text.c_str(), text.size() + 1);
  return text.size();
}

void ng_set_callback(Callback function, unsigned mask) {
  callback = function;
  callback_mask = function ? mask : 0;
}

void ng_event(int category, const char* name, size_t bytes) {
  if (callback && (callback_mask & (1u << category))) callback(category, name, bytes);
}

int ng_stub(const char* name) {
  ng_count((std::string("stub:") + name).c_str(), 1);
  return 0;
}

void ng_log(const char* format, ...) {
  static const bool is_on = ng_setting("NULLGPU_LOG", 0);
  if (!is_on) return;
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "[null GPU] ");
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}
}
