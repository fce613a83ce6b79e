// libcublasLt.so.13: a matrix product is one launch; every question for an algorithm has one answer.
#include "core.h"

struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};
static const int EXECUTION_FAILED = 13;

extern "C" {
size_t cublasLtGetVersion() { return 130000; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, Heuristic* out,
                                   int* found) {
  *found = wanted > 0;
  if (*found) *out = Heuristic{{}, 0, 0, 1.0f, {}};
  return 0;
}
int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                   void*, void*, const void*, void*, size_t, void* stream) {
  return ng_launch(stream, "cublas", "cublasLtMatmul") ? EXECUTION_FAILED : 0;
}
}
