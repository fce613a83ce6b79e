// Devices, and their memory: zero-filled host memory that is mapped when it is first touched.
#include "core.h"

#include <map>
#include <mutex>

#include <stdlib.h>
#include <sys/mman.h>

static const size_t PAGE = 4096;
static const int MAX_DEVICES = 64;
static const size_t DRIVER_BYTES = 500u << 20;  // what a real driver keeps for itself

struct Range {
  size_t bytes;
  int device;
  MemoryKind kind;
};
typedef std::lock_guard<std::mutex> Lock;

static thread_local int current_device = 0;
static size_t used[MAX_DEVICES];

static std::mutex& guard() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
static std::map<uintptr_t, Range>& ranges() {  // by address: all memory that is not pageable
  static auto* map = new std::map<uintptr_t, Range>;
  return *map;
}
static size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) & ~(to - 1); }

// Take a new range of addresses.
static int take(void** pointer, size_t bytes, MemoryKind kind) {
  void* begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) return OUT_OF_MEMORY;
  madvise(begin, bytes, MADV_NOHUGEPAGE);
  ranges()[(uintptr_t)begin] = {bytes, current_device, kind};
  *pointer = begin;
  return 0;
}

// Give a range back whose memory was counted as used, or not.
static int give_back(void* pointer, MemoryKind kind, bool is_counted) {
  auto found = ranges().find((uintptr_t)pointer);
  if (found == ranges().end() || found->second.kind != kind) return INVALID_VALUE;
  if (is_counted) used[found->second.device] -= found->second.bytes;
  munmap(pointer, found->second.bytes);
  ranges().erase(found);
  return 0;
}

extern "C" {
int ng_num_devices() {
  static const int count = (int)ng_setting("NULLGPU_DEVICES", 1);
  return count < MAX_DEVICES ? count : MAX_DEVICES;
}

size_t ng_total_bytes() {
  static const size_t bytes = (size_t)ng_setting("NULLGPU_MEM_GB", 80) << 30;
  return bytes;
}

int ng_device() { return current_device; }

int ng_set_device(int device) {
  if (device < 0 || device >= ng_num_devices()) return INVALID_DEVICE;
  current_device = device;
  return 0;
}

int ng_malloc(void** pointer, size_t bytes, const char* who) {
  if (int error = ng_unsafe(who)) return error;
  COUNT("alloc.device");
  COUNT_N("alloc.device_bytes", bytes);
  ng_event(ALLOC, who, bytes);
  *pointer = nullptr;
  if (!bytes) return 0;
  bytes = round_up(bytes, PAGE);
  Lock lock(guard());
  if (used[current_device] + bytes > ng_total_bytes()) return OUT_OF_MEMORY;
  if (int error = take(pointer, bytes, DEVICE)) return error;
  used[current_device] += bytes;
  return 0;
}

int ng_free(void* pointer, const char* who) {
  if (!pointer) return 0;
  if (int error = ng_unsafe(who)) return error;
  ng_event(ALLOC, who, 0);
  Lock lock(guard());
  return give_back(pointer, DEVICE, true);
}

int ng_host_alloc(void** pointer, size_t bytes, const char* who) {
  if (int error = ng_unsafe(who)) return error;
  COUNT("alloc.pinned");
  ng_event(ALLOC, who, bytes);
  *pointer = nullptr;
  if (!bytes) return 0;
  Lock lock(guard());
  return take(pointer, round_up(bytes, PAGE), PINNED);
}

int ng_host_free(void* pointer, const char* who) {
  if (!pointer) return 0;
  if (int error = ng_unsafe(who)) return error;
  Lock lock(guard());
  return give_back(pointer, PINNED, false);
}

int ng_host_register(void* pointer, size_t bytes) {
  if (int error = ng_unsafe("cudaHostRegister")) return error;
  ng_event(ALLOC, "cudaHostRegister", bytes);
  Lock lock(guard());
  ranges()[(uintptr_t)pointer] = {bytes, current_device, PINNED};
  return 0;
}

int ng_host_unregister(void* pointer) {
  Lock lock(guard());
  return ranges().erase((uintptr_t)pointer) ? 0 : INVALID_VALUE;
}

void* ng_reserve(size_t bytes) {
  void* begin = nullptr;
  Lock lock(guard());
  take(&begin, round_up(bytes, PAGE), DEVICE);
  return begin;
}

int ng_unreserve(void* pointer) {
  Lock lock(guard());
  return give_back(pointer, DEVICE, false);
}

int ng_use(int device, size_t bytes) {
  Lock lock(guard());
  if (used[device] + bytes > ng_total_bytes()) return OUT_OF_MEMORY;
  used[device] += bytes;
  return 0;
}

void ng_unuse(int device, size_t bytes) {
  Lock lock(guard());
  used[device] -= bytes;
}

void ng_discard(void* pointer, size_t bytes) { madvise(pointer, bytes, MADV_DONTNEED); }

int ng_where(const void* pointer, int* device, uintptr_t* base, size_t* bytes) {
  Lock lock(guard());
  auto after = ranges().upper_bound((uintptr_t)pointer);
  if (after == ranges().begin()) return PAGEABLE;
  auto& [begin, range] = *std::prev(after);
  if ((uintptr_t)pointer >= begin + range.bytes) return PAGEABLE;
  if (device) *device = range.device;
  if (base) *base = begin;
  if (bytes) *bytes = range.bytes;
  return range.kind;
}

size_t ng_free_bytes(int device) {
  Lock lock(guard());
  size_t taken = used[device] + DRIVER_BYTES;
  return taken < ng_total_bytes() ? ng_total_bytes() - taken : 0;
}
}
