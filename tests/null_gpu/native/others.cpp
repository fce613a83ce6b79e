// Libraries of which the wheels need little: versions and handles. LIB_NAME says which one is compiled.
#include "core.h"

#include <stdlib.h>
#include <string.h>

extern "C" {
#ifdef LIB_cudnn
size_t cudnnGetVersion() { return 92000; }
size_t cudnnGetCudartVersion() { return 13000; }
int cudnnBackendCreateDescriptor(int, void** out) { return (*out = calloc(1, 4096), 0); }
#endif
#ifdef LIB_cufft
int cufftCreate(int* plan) { return (*plan = 1, 0); }
#endif
#ifdef LIB_cupti
static const int NO_MORE_RECORDS = 12;
int cuptiGetVersion(uint32_t* version) { return (*version = 130000, 0); }
int cuptiGetResultString(int, const char** text) { return (*text = "null GPU", 0); }
int cuptiActivityGetNextRecord() { return NO_MORE_RECORDS; }
#endif
#ifdef LIB_nvrtc
int nvrtcVersion(int* major, int* minor) { return (*major = 13, *minor = 0, 0); }
int nvrtcCreateProgram(void** program) { return (*program = calloc(1, 64), 0); }
int nvrtcGetCUBINSize(void*, size_t* size) { return (*size = 16, 0); }
int nvrtcGetPTXSize(void*, size_t* size) { return (*size = 16, 0); }
int nvrtcGetProgramLogSize(void*, size_t* size) { return (*size = 1, 0); }
int nvrtcGetCUBIN(void*, char* out) { return (memset(out, 0, 16), 0); }
int nvrtcGetPTX(void*, char* out) { return (memset(out, 0, 16), 0); }
int nvrtcGetProgramLog(void*, char* out) { return (*out = 0, 0); }
int nvrtcGetLoweredName(void*, const char* expression, const char** name) { return (*name = expression, 0); }
#endif
}
