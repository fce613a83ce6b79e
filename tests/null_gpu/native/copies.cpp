// Launches, which do nothing, and copies, memsets and host functions, which are done at once.
#include "core.h"

#include <string>

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

static const char* COPY_NAMES[3][3] = {
    // by the kind of memory of the source, then of the destination
    {"copy.h2h", "copy.h2h", "copy.h2d_pageable"},
    {"copy.h2h", "copy.h2h", "copy.h2d_pinned"},
    {"copy.d2h_pageable", "copy.d2h_pinned", "copy.d2d"},
};

// Clear memory without touching its pages where that is worth it.
static void clear(char* begin, size_t bytes) {
  char *first = (char*)(((uintptr_t)begin + 4095) & ~4095ULL), *last = (char*)((uintptr_t)(begin + bytes) & ~4095ULL);
  if (bytes < (1 << 20) || first >= last || ng_where(begin, 0, 0, 0) != DEVICE) {
    memset(begin, 0, bytes);
    return;
  }
  memset(begin, 0, first - begin);
  madvise(first, last - first, MADV_DONTNEED);
  memset(last, 0, begin + bytes - last);
}

static void fill(void* dst, int value, size_t width, size_t bytes) {
  if (value == 0) return clear((char*)dst, bytes);
  if (width == 1) memset(dst, value, bytes);
  if (width == 2)
    for (size_t i = 0; i < bytes / 2; i++) ((uint16_t*)dst)[i] = (uint16_t)value;
  if (width == 4)
    for (size_t i = 0; i < bytes / 4; i++) ((uint32_t*)dst)[i] = (uint32_t)value;
}

extern "C" {
int ng_check_grid(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, const char* kernel) {
  bool is_empty = !gx || !gy || !gz || !bx || !by || !bz;
  bool is_too_large = gx > 2147483647u || gy > 65535 || gz > 65535 || (uint64_t)bx * by * bz > 1024;
  if (!is_empty && !is_too_large) return 0;
  COUNT("bad_grid");
  ng_event(ILLEGAL, kernel, 0);
  ng_log("%s: invalid grid (%u, %u, %u) or block (%u, %u, %u)", kernel, gx, gy, gz, bx, by, bz);
  return INVALID_CONFIGURATION;
}

int ng_launch(void* stream, const char* api, const char* kernel) {
  Node* node = nullptr;
  int entered = ng_enter(stream, KERNEL_NODE, kernel, &node);
  if (entered > 0) return entered;
  if (entered == -1) {
    COUNT("captured.kernel");
    ng_count((std::string("captured.") + api).c_str(), 1);
    return 0;
  }
  COUNT("launch");
  ng_count((std::string("launch.") + api).c_str(), 1);
  ng_count((std::string("kernel:") + kernel).substr(0, 200).c_str(), 1);
  ng_event(LAUNCH, kernel, 0);
  return 0;
}

int ng_memcpy(void* dst, const void* src, size_t bytes, void* handle, int is_blocking, const char* who) {
  if (!bytes) return 0;
  if (is_blocking)
    if (int error = ng_unsafe(who)) return error;
  int from = ng_where(src, 0, 0, 0), to = ng_where(dst, 0, 0, 0);
  bool is_pageable = from == PAGEABLE || to == PAGEABLE, touches_device = from == DEVICE || to == DEVICE;
  Stream* stream = ng_stream(handle);
  if (is_pageable && stream && stream->capture) {
    stream->capture->is_invalid = true;
    ng_illegal((std::string(who) + " of pageable memory").c_str());
    return CAPTURE_UNSUPPORTED;
  }
  Node* node = nullptr;
  int entered = ng_enter(handle, MEMCPY_NODE, "memcpy", &node);
  if (entered > 0) return entered;
  if (entered == -1) {
    node->dst = dst, node->src = src, node->bytes = bytes;
    COUNT("captured.memcpy");
    return 0;
  }
  const char* name = COPY_NAMES[from][to];
  ng_count(name, 1);
  ng_count((std::string(name) + "_bytes").c_str(), bytes);
  if (is_blocking || (is_pageable && touches_device)) COUNT("copy.blocking");
  ng_event(COPY, name, bytes);
  memmove(dst, src, bytes);
  return 0;
}

int ng_memset(void* dst, int value, size_t width, size_t bytes, void* stream, int is_blocking, const char* who) {
  if (!bytes) return 0;
  if (is_blocking)
    if (int error = ng_unsafe(who)) return error;
  Node* node = nullptr;
  int entered = ng_enter(stream, MEMSET_NODE, "memset", &node);
  if (entered > 0) return entered;
  if (entered == -1) {
    node->dst = dst, node->value = value, node->width = width, node->bytes = bytes;
    COUNT("captured.memset");
    return 0;
  }
  fill(dst, value, width, bytes);
  return 0;
}

int ng_host_function(void* stream, void (*function)(void*), void* argument) {
  Node* node = nullptr;
  int entered = ng_enter(stream, HOST_NODE, "host function", &node);
  if (entered > 0) return entered;
  if (entered == -1) {
    node->function = function, node->argument = argument;
    return 0;
  }
  function(argument);
  return 0;
}

void ng_run_node(Node* node) {
  if (node->kind == MEMCPY_NODE) memmove(node->dst, node->src, node->bytes);
  if (node->kind == MEMSET_NODE) fill(node->dst, node->value, node->width, node->bytes);
  if (node->kind == HOST_NODE) node->function(node->argument);
}
}
