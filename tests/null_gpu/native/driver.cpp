// libcuda.so.1: the entry points of the driver that do something. The declarations are our own, so that no macro of
// CUDA's headers renames them.
#include "core.h"

#include <string>

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long Address;
struct Function {
  std::string name;
};
struct Launch {  // CUlaunchConfig
  unsigned gx, gy, gz, bx, by, bz, shared_bytes;
  void* stream;
  void* attributes;
  unsigned num_attributes;
};
struct Physical {  // memory without an address
  int device;
  size_t bytes;
};

struct Attribute {  // CUdevice_attribute
  int number, value;
};

static const Attribute ATTRIBUTES[] = {  // an H100's
    {1, 1024}, {2, 1024}, {3, 1024}, {4, 64},                // threads of a block, its x, y and z
    {5, 2147483647}, {6, 65535}, {7, 65535},                 // a grid's x, y and z
    {8, 49152}, {97, 232448}, {111, 1024}, {81, 233472},     // shared bytes: a block's, by choice, reserved, of an SM
    {9, 65536}, {12, 65536}, {82, 65536},                    // constant bytes, registers of a block, of an SM
    {10, 32}, {16, 132}, {39, 2048}, {106, 32},              // lanes of a warp, SMs, threads of an SM, its blocks
    {11, 2147483647}, {14, 512}, {40, 3}, {87, 2},           // pitch, texture alignment, copy engines, single to double
    {13, 1980000}, {36, 2619000}, {37, 5120},                // kHz, memory's kHz, its bits
    {38, 52428800}, {108, 32768000}, {109, 134213632},       // L2 bytes, those that persist, access policy window
    {75, CAPABILITY / 10}, {76, CAPABILITY % 10},
};
// What it can do.
static const int ABILITIES[] = {19, 31, 32, 41, 78,  79,  80,  83,  89,  90,  91,  92,
                                93, 94, 95, 99, 100, 102, 103, 115, 120, 122, 127};
static const int VERSION = 13000, MAX_DEVICES = 64;
static char contexts[MAX_DEVICES];  // the address of element i stands for the context of device i

template <class T, class U>
static int give(T* out, U value) {
  if (out) *out = (T)value;
  return 0;
}
static void* handle() { return calloc(1, 64); }

extern "C" {
// ---- devices and contexts

int ng_device_attribute(int attribute, int device) {
  if (attribute == 33) return 1 + device;  // PCI bus
  for (const Attribute& known : ATTRIBUTES)
    if (known.number == attribute) return known.value;
  for (int ability : ABILITIES)
    if (ability == attribute) return 1;
  return 0;
}

int cuInit(unsigned) { return ng_num_devices() ? 0 : NO_DEVICE; }
int cuDriverGetVersion(int* version) { return give(version, VERSION); }
int cuDeviceGet(int* device, int ordinal) {
  return ordinal < 0 || ordinal >= ng_num_devices() ? INVALID_DEVICE : give(device, ordinal);
}
int cuDeviceGetUuid(void* uuid, int device) { return memset(uuid, 0x11 + device, 16) == nullptr; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return give(value, ng_device_attribute(attribute, device));
}
int cuDevicePrimaryCtxRetain(void** context, int device) { return give(context, &contexts[device]); }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) { return give(flags, 0) + give(is_active, 1); }
int cuCtxGetCurrent(void** context) { return give(context, &contexts[ng_device()]); }
int cuCtxSetCurrent(void* context) {
  ptrdiff_t device = (char*)context - contexts;
  return device < 0 || device >= MAX_DEVICES ? 0 : ng_set_device((int)device);
}
int cuGetErrorString(int error, const char** text) {
  static thread_local char buffer[64];
  snprintf(buffer, sizeof buffer, "null GPU's driver error %d", error);
  return give(text, buffer);
}

// ---- modules and launches

int cuModuleLoadData(void** module, const void*) {
  if (int error = ng_unsafe("cuModuleLoadData")) return error;
  return give(module, handle());
}
int cuModuleLoadDataEx(void** module, const void* image, unsigned, void*, void*) {
  return cuModuleLoadData(module, image);
}
int cuModuleLoad(void** module, const char*) { return cuModuleLoadData(module, nullptr); }
int cuModuleGetFunction(void** function, void*, const char* name) { return give(function, new Function{name}); }
int cuModuleGetGlobal_v2(Address* address, size_t* bytes, void*, const char*) {
  return give(address, (Address)ng_reserve(1 << 20)) + give(bytes, 1 << 20);
}
int cuFuncGetAttribute(int* value, int attribute, void*) {
  bool is_version = attribute == 5 || attribute == 6;  // of PTX and of the binary
  return give(value, attribute == 0 ? 1024 : attribute == 4 ? 64 : is_version ? CAPABILITY : 0);
}

static int launch(void* function, const Launch& config, const char* api) {
  const char* name = ((Function*)function)->name.c_str();
  // The driver says "invalid value" where the runtime says "invalid configuration".
  if (ng_check_grid(config.gx, config.gy, config.gz, config.bx, config.by, config.bz, name)) return INVALID_VALUE;
  return ng_launch(config.stream, api, name);
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared_bytes, void* stream, void**, void**) {
  return launch(function, {gx, gy, gz, bx, by, bz, shared_bytes, stream}, "cuLaunchKernel");
}
int cuLaunchKernelEx(const Launch* config, void* function, void**, void**) {
  return launch(function, *config, "cuLaunchKernelEx");
}
int cuLaunchCooperativeKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                              unsigned bz, unsigned shared_bytes, void* stream, void**) {
  return launch(function, {gx, gy, gz, bx, by, bz, shared_bytes, stream}, "cuLaunchCooperativeKernel");
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void*, int, size_t) { return give(count, 2); }
int cuTensorMapEncodeTiled(void* map) { return memset(map, 0, 128) == nullptr; }

// ---- memory

int cuPointerGetAttribute(void* out, int attribute, Address address) {
  int device = 0;
  uintptr_t base = 0;
  size_t bytes = 0;
  int kind = ng_where((void*)address, &device, &base, &bytes);
  if (kind == PAGEABLE) return INVALID_VALUE;
  switch (attribute) {  // CUpointer_attribute
    case 1: return give((void**)out, &contexts[device]);
    case 2: return give((unsigned*)out, kind == DEVICE ? 2 : 1);
    case 3: return give((Address*)out, address);
    case 4: return kind == DEVICE ? INVALID_VALUE : give((Address*)out, address);
    case 7: return give((unsigned long long*)out, base);  // the allocation's number
    case 8: return give((unsigned char*)out, 0);          // managed
    case 9: return give((int*)out, device);
    case 10: return give((unsigned char*)out, 1);  // can be shared
    case 11: return give((Address*)out, base);
    case 12: return give((size_t*)out, bytes);
    case 13: return give((unsigned char*)out, 1);  // mapped
    default: return give((int*)out, 0);
  }
}

// Addresses and memory apart, as vLLM's sleep mode handles them: what is unmapped loses its values.
int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) { return give(bytes, 2 << 20); }
int cuMemAddressReserve(Address* address, size_t bytes, size_t, Address, Address) {
  return give(address, (Address)ng_reserve(bytes)) + (*address ? 0 : OUT_OF_MEMORY);
}
int cuMemAddressFree(Address address, size_t) { return ng_unreserve((void*)address); }
int cuMemCreate(Address* memory, size_t bytes, const void*, Address) {
  if (int error = ng_unsafe("cuMemCreate")) return error;
  COUNT("alloc.physical");
  ng_event(ALLOC, "cuMemCreate", bytes);
  if (int error = ng_use(ng_device(), bytes)) return error;
  return give(memory, (Address) new Physical{ng_device(), bytes});
}
int cuMemRelease(Address memory) {
  auto* physical = (Physical*)memory;
  ng_unuse(physical->device, physical->bytes);
  delete physical;
  return 0;
}
int cuMemUnmap(Address address, size_t bytes) {
  ng_discard((void*)address, bytes);
  return 0;
}

// ---- look-up

int cuGetProcAddress_v2(const char* symbol, void** function, int, uint64_t, int* status) {
  static void* self = nullptr;
  if (!self) {
    Dl_info info;
    dladdr((void*)cuInit, &info);
    self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }
  *function = nullptr;
  // The newest version that there is; names that carry a version already are found as they are.
  for (const char* suffix : {"_v4", "_v3", "_v2", ""})
    if (!*function) *function = dlsym(self, (std::string(symbol) + suffix).c_str());
  if (!*function) ng_log("cuGetProcAddress: no %s", symbol);
  give(status, *function ? 0 : 1);
  return *function ? 0 : NOT_FOUND;
}
}
