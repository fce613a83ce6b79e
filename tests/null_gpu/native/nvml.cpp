// libnvidia-ml.so.1: what vLLM asks of NVML. It is loaded without the driver, hence settings of its own.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int NOT_FOUND = 6;
static const unsigned long long MIB = 1 << 20;
struct PciInfo {
  char legacy_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
};
struct Memory {
  unsigned long long total, free, used;
};
struct MemoryV2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

static long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}
static int num_devices() { return (int)setting("NULLGPU_DEVICES", 1); }
static unsigned long long total_bytes() { return (unsigned long long)setting("NULLGPU_MEM_GB", 80) << 30; }

// A handle is a made-up address with the device's number in it.
static const unsigned long FIRST = 0x1000, APART = 16;
static int index_of(void* handle) { return (int)(((unsigned long)handle - FIRST) / APART); }
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
int nvmlSystemGetDriverVersion(char* out, unsigned size) { return snprintf(out, size, "580.00.00") < 0; }
int nvmlSystemGetNVMLVersion(char* out, unsigned size) { return snprintf(out, size, "13.580.00.00") < 0; }
int nvmlSystemGetCudaDriverVersion(int* version) { return (*version = 13000, 0); }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return (*version = 13000, 0); }
int nvmlDeviceGetCount(unsigned* count) { return (*count = num_devices(), 0); }
int nvmlDeviceGetCount_v2(unsigned* count) { return (*count = num_devices(), 0); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) { return find(index, handle); }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  const char* last = strrchr(uuid, '-');
  return last ? find(atol(last + 1), handle) : NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
  const char* bus = strchr(id, ':');
  return bus ? find(strtol(bus + 1, nullptr, 16) - 1, handle) : NOT_FOUND;
}
int nvmlDeviceGetIndex(void* handle, unsigned* index) { return (*index = index_of(handle), 0); }
int nvmlDeviceGetName(void*, char* out, unsigned size) { return snprintf(out, size, "Null H100") < 0; }
int nvmlDeviceGetUUID(void* handle, char* out, unsigned size) {
  return snprintf(out, size, "GPU-11111111-1111-1111-1111-%012d", index_of(handle)) < 0;
}
int nvmlDeviceGetMemoryInfo(void*, Memory* out) {
  *out = Memory{total_bytes(), total_bytes() - 500 * MIB, 500 * MIB};
  return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void*, MemoryV2* out) {
  *out = MemoryV2{out->version, total_bytes(), 0, total_bytes() - 500 * MIB, 500 * MIB};
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = 9, *minor = 0;
  return 0;
}
int nvmlDeviceGetPciInfo_v3(void* handle, PciInfo* out) {
  *out = PciInfo{};
  out->bus = 1 + index_of(handle);
  snprintf(out->legacy_id, sizeof out->legacy_id, "0000:%02X:00.0", out->bus);
  snprintf(out->id, sizeof out->id, "00000000:%02X:00.0", out->bus);
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return (*count = 0, 0); }
int nvmlDeviceGetComputeRunningProcesses_v2(void*, unsigned* count, void*) { return (*count = 0, 0); }
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) { return (*count = 0, 0); }
int nvmlDeviceGetNumaNodeId(void*, unsigned* node) { return (*node = 0, 0); }
int nvmlDeviceGetP2PStatus(void*, void*, int, int* status) { return (*status = 0, 0); }
int nvmlDeviceGetCpuAffinity(void*, unsigned size, unsigned long* mask) {
  memset(mask, 0, size * sizeof *mask);
  return (mask[0] = 3, 0);
}
}
