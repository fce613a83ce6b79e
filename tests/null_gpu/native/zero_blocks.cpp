// libnullgpu_torch.so: every block that PyTorch's caching allocator hands out reads as zeros. Kernels write nothing,
// and stale bytes would pass for token ids. Load it after torch and call ng_zero_blocks() once.
#include <c10/cuda/CUDACachingAllocator.h>

#include <string.h>
#include <sys/mman.h>

extern "C" void ng_zero_blocks() {
  namespace Allocator = c10::cuda::CUDACachingAllocator;
  Allocator::attachAllocatorTraceTracker([](const Allocator::TraceEntry& entry) {
    if (entry.action_ != Allocator::TraceEntry::Action::ALLOC) return;
    char* begin = (char*)entry.addr_;
    char* end = begin + entry.size_;
    char* first = (char*)(((uintptr_t)begin + 4095) & ~4095ULL);
    char* last = (char*)((uintptr_t)end & ~4095ULL);
    if (entry.size_ <= (1u << 20)) {
      memset(begin, 0, entry.size_);
      return;
    }
    memset(begin, 0, first - begin);
    madvise(first, last - first, MADV_DONTNEED);  // without touching the pages
    memset(last, 0, end - last);
  });
}
