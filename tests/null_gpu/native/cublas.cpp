// libcublas.so.13: a matrix product is one launch on the handle's stream.
#include "core.h"

#include <stdlib.h>

struct Handle {
  void* stream;
};
static const int EXECUTION_FAILED = 13;

extern "C" {
int cublasDestroy_v2(Handle* handle) {
  free(handle);
  return 0;
}
int cublasSetStream_v2(Handle* handle, void* stream) {
  handle->stream = stream;
  return 0;
}
int cublasGetMathMode(Handle*, int* mode) { return (*mode = 0, 0); }
int cublasGetPointerMode_v2(Handle*, int* mode) { return (*mode = 0, 0); }
#define LAUNCHES(name) \
  int name(Handle* handle) { return ng_launch(handle->stream, "cublas", #name) ? EXECUTION_FAILED : 0; }
#include "cublas_launches.inc"  // generated: every product that the wheels need
}
