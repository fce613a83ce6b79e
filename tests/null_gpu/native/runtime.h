// What the two sources of the runtime share.
#pragma once
#include <cuda_runtime_api.h>

cudaError_t result(int error);  // remembers it for cudaGetLastError

template <class T, class U>
cudaError_t give(T* out, U value) {
  if (out) *out = (T)value;
  return cudaSuccess;
}
