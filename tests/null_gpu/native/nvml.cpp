// libnvidia-ml.so.1: what vLLM asks of NVML. It is loaded without the driver, hence settings of its own.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int NOT_FOUND = 6;
static const unsigned long long MIB = 1 << 20;
struct Memory {
  unsigned long long total, free, used;
};

static long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}
static int num_devices() { return (int)setting("NULLGPU_DEVICES", 1); }
static unsigned long long total_bytes() { return (unsigned long long)setting("NULLGPU_MEM_GB", 80) << 30; }

// A handle is a made-up address with the device's number in it.
static const unsigned long FIRST = 0x1000, APART = 16;
static int find(long device, void** handle) {
  if (device < 0 || device >= num_devices()) return NOT_FOUND;
  *handle = (void*)(FIRST + APART * device);
  return 0;
}

extern "C" {
int nvmlInit() { return 0; }
int nvmlInit_v2() { return 0; }
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int error) { return error ? "an error of the null GPU's NVML" : "Success"; }
int nvmlDeviceGetCount_v2(unsigned* count) { return (*count = num_devices(), 0); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) { return find(index, handle); }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
  const char* bus = strchr(id, ':');
  return bus ? find(strtol(bus + 1, nullptr, 16) - 1, handle) : NOT_FOUND;
}
int nvmlDeviceGetName(void*, char* out, unsigned size) { return snprintf(out, size, "Null H100") < 0; }
int nvmlDeviceGetMemoryInfo(void*, Memory* out) {
  *out = Memory{total_bytes(), total_bytes() - 500 * MIB, 500 * MIB};
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = 9, *minor = 0;  // an H100's
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return (*count = 0, 0); }
}
