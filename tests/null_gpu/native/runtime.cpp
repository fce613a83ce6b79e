// libcudart.so.13: registration, launches, devices, errors and memory. Streams and graphs: runtime_streams.cpp.
#include "core.h"
#include "runtime.h"

#include <mutex>
#include <string>
#include <unordered_map>

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Kernel {
  std::string name;
};
struct Variable {
  void* address;
  size_t bytes;
};
struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
static const int VERSION = 13000, MAX_NESTED = 16;
static thread_local int last_error = 0;
static thread_local Configuration configurations[MAX_NESTED];
static thread_local int num_configurations = 0;
static Kernel unregistered{"unregistered"};
static const cudaMemPool_t POOL = (cudaMemPool_t)0x4e47;

static std::mutex& guard() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
static std::unordered_map<const void*, Kernel*>& kernels() {
  static auto* map = new std::unordered_map<const void*, Kernel*>;
  return *map;
}
static std::unordered_map<const void*, Variable>& variables() {
  static auto* map = new std::unordered_map<const void*, Variable>;
  return *map;
}
static Kernel* kernel_of(const void* function) {
  std::lock_guard<std::mutex> lock(guard());
  auto found = kernels().find(function);
  return found == kernels().end() ? &unregistered : found->second;
}

cudaError_t result(int error) {
  if (error) {
    last_error = error;
    ng_log("the runtime returns %d", error);
  }
  return (cudaError_t)error;
}

static cudaError_t launch(Kernel* kernel, dim3 grid, dim3 block, cudaStream_t stream, const char* api) {
  const char* name = kernel->name.c_str();
  int error = ng_check_grid(grid.x, grid.y, grid.z, block.x, block.y, block.z, name);
  return result(error ? error : ng_launch(stream, api, name));
}

// Stream-ordered allocations are allowed while capturing.
template <class Call>
static cudaError_t relaxed(Call call) {
  int mode = RELAXED;
  ng_exchange_mode(&mode);
  int error = call();
  ng_exchange_mode(&mode);
  return result(error);
}

struct ErrorText {
  int error;
  const char *name, *text;
};
static const ErrorText ERRORS[] = {
    {0, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {INVALID_CONFIGURATION, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {ILLEGAL_STATE, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {CAPTURE_MERGE, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {CAPTURE_UNMATCHED, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {CAPTURE_UNJOINED, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {CAPTURE_ISOLATION, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {CAPTURE_IMPLICIT, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CAPTURED_EVENT, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {CAPTURE_WRONG_THREAD, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};
static const ErrorText& describe(int error) {
  static const ErrorText unknown{999, "cudaErrorUnknown", "an error of the null GPU's"};
  for (const ErrorText& known : ERRORS)
    if (known.error == error) return known;
  return unknown;
}

extern "C" {
// ---- registration and launches

void** __cudaRegisterFatBinary(void*) { return (void**)calloc(1, 64); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  std::lock_guard<std::mutex> lock(guard());
  Kernel*& kernel = kernels()[function];
  if (!kernel) kernel = new Kernel{name};
}
void __cudaRegisterVar(void**, char* variable, char*, const char*, int, size_t bytes, int, int) {
  std::lock_guard<std::mutex> lock(guard());
  variables()[variable] = {nullptr, bytes};
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return give(kernel, (cudaKernel_t)kernel_of(function));
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st* stream) {
  if (num_configurations == MAX_NESTED) return INVALID_CONFIGURATION;
  configurations[num_configurations++] = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (!num_configurations) return result(INVALID_CONFIGURATION);
  const Configuration& last = configurations[--num_configurations];
  *grid = last.grid, *block = last.block, *shared_bytes = last.shared_bytes, *(cudaStream_t*)stream = last.stream;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch((Kernel*)kernel, grid, block, stream, "cudaLaunchKernel");
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch(kernel_of(function), grid, block, stream, "cudaLaunchKernel");
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t,
                                        cudaStream_t stream) {
  return launch(kernel_of(function), grid, block, stream, "cudaLaunchCooperativeKernel");
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return launch(kernel_of(function), config->gridDim, config->blockDim, config->stream, "cudaLaunchKernelExC");
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return result(ng_host_function(stream, function, argument));
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 64;
  attributes->ptxVersion = attributes->binaryVersion = CAPABILITY;
  attributes->maxDynamicSharedSizeBytes = 227 * 1024;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  return give(count, 1);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  return give(count, 1);
}
cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
  std::lock_guard<std::mutex> lock(guard());
  auto found = variables().find(symbol);
  if (found == variables().end()) return result(cudaErrorInvalidSymbol);
  Variable& variable = found->second;
  if (!variable.address) variable.address = ng_reserve(variable.bytes + 256);
  return give(pointer, variable.address);
}
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* src, size_t bytes, size_t offset, cudaMemcpyKind) {
  void* pointer = nullptr;
  if (cudaError_t error = cudaGetSymbolAddress(&pointer, symbol)) return error;
  return result(ng_memcpy((char*)pointer + offset, src, bytes, nullptr, 1, "cudaMemcpyToSymbol"));
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**, unsigned,
                                cudaLibraryOption*, void**, unsigned) {
  return give(library, (cudaLibrary_t)calloc(1, 64));
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char* name) {
  return give(kernel, (cudaKernel_t) new Kernel{name});
}

// ---- devices

cudaError_t cudaGetDeviceCount(int* count) {
  give(count, ng_num_devices());
  return result(ng_num_devices() ? 0 : NO_DEVICE);
}
cudaError_t cudaGetDevice(int* device) { return give(device, ng_device()); }
cudaError_t cudaSetDevice(int device) { return result(ng_set_device(device)); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= ng_num_devices()) return result(INVALID_DEVICE);
  return give(value, ng_device_attribute((int)attribute, device));
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  if (device < 0 || device >= ng_num_devices()) return result(INVALID_DEVICE);
  auto attribute = [&](cudaDeviceAttr which) { return ng_device_attribute((int)which, device); };
  cudaDeviceProp properties{};
  snprintf(properties.name, sizeof properties.name, "Null H100");
  memset(&properties.uuid, 0x11 + device, 16);
  properties.totalGlobalMem = ng_total_bytes();
  properties.sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  properties.regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
  properties.warpSize = attribute(cudaDevAttrWarpSize);
  properties.maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  properties.maxThreadsDim[0] = attribute(cudaDevAttrMaxBlockDimX);
  properties.maxThreadsDim[1] = attribute(cudaDevAttrMaxBlockDimY);
  properties.maxThreadsDim[2] = attribute(cudaDevAttrMaxBlockDimZ);
  properties.maxGridSize[0] = attribute(cudaDevAttrMaxGridDimX);
  properties.maxGridSize[1] = attribute(cudaDevAttrMaxGridDimY);
  properties.maxGridSize[2] = attribute(cudaDevAttrMaxGridDimZ);
  properties.major = CAPABILITY / 10;
  properties.minor = CAPABILITY % 10;
  properties.multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  properties.pciBusID = attribute(cudaDevAttrPciBusId);
  properties.memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  properties.l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  properties.maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties.sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties.regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  properties.maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  properties.sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return give(out, properties);
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  snprintf(id, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  give(lowest, 0);
  return give(highest, -5);
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int first, int second) { return give(can, first != second); }
cudaError_t cudaDeviceSynchronize() { return result(ng_device_synchronize()); }
cudaError_t cudaDriverGetVersion(int* version) { return give(version, VERSION); }
cudaError_t cudaRuntimeGetVersion(int* version) { return give(version, VERSION); }

// ---- errors and look-up

cudaError_t cudaPeekAtLastError() { return (cudaError_t)last_error; }
cudaError_t cudaGetLastError() {
  int error = last_error;
  last_error = 0;
  return (cudaError_t)error;
}
const char* cudaGetErrorString(cudaError_t error) { return describe((int)error).text; }
const char* cudaGetErrorName(cudaError_t error) { return describe((int)error).name; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult* status) {
  typedef int (*Lookup)(const char*, void**, int, uint64_t, int*);
  static const auto lookup = (Lookup)dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL), "cuGetProcAddress_v2");
  int ignored = 0;
  lookup(symbol, function, version, flags, &ignored);
  return give(status, *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound);
}

// ---- memory

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  give(free, ng_free_bytes(ng_device()));
  return give(total, ng_total_bytes());
}
cudaError_t cudaMalloc(void** pointer, size_t bytes) { return result(ng_malloc(pointer, bytes, "cudaMalloc")); }
cudaError_t cudaFree(void* pointer) { return result(ng_free(pointer, "cudaFree")); }
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  return relaxed([&] { return ng_malloc(pointer, bytes, "cudaMallocAsync"); });
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  return relaxed([&] { return ng_free(pointer, "cudaFreeAsync"); });
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return result(ng_host_alloc(pointer, bytes, "cudaHostAlloc"));
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return result(ng_host_alloc(pointer, bytes, "cudaMallocHost"));
}
cudaError_t cudaFreeHost(void* pointer) { return result(ng_host_free(pointer, "cudaFreeHost")); }
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) { return result(ng_host_register(pointer, bytes)); }
cudaError_t cudaHostUnregister(void* pointer) { return result(ng_host_unregister(pointer)); }
cudaError_t cudaHostGetDevicePointer(void** address, void* pointer, unsigned) {
  give(address, pointer);
  return result(ng_where(pointer, 0, 0, 0) == PAGEABLE ? INVALID_VALUE : 0);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  static const cudaMemoryType TYPES[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice};
  memset(attributes, 0, sizeof *attributes);
  attributes->device = -2;
  int kind = ng_where(pointer, &attributes->device, 0, 0);
  attributes->type = TYPES[kind];
  attributes->devicePointer = kind == PAGEABLE ? nullptr : (void*)pointer;
  attributes->hostPointer = kind == DEVICE ? nullptr : (void*)pointer;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind) {
  return result(ng_memcpy(dst, src, bytes, nullptr, 1, "cudaMemcpy"));
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return result(ng_memcpy(dst, src, bytes, stream, 0, "cudaMemcpyAsync"));
}
cudaError_t cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t bytes, cudaStream_t stream) {
  return result(ng_memcpy(dst, src, bytes, stream, 0, "cudaMemcpyPeerAsync"));
}
static cudaError_t copy_rows(void* dst, size_t to, const void* src, size_t from, size_t width, size_t height,
                             cudaStream_t stream, int is_blocking, const char* who) {
  int error = 0;
  for (size_t i = 0; i < height && !error; i++)
    error = ng_memcpy((char*)dst + i * to, (const char*)src + i * from, width, stream, is_blocking, who);
  return result(error);
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t to, const void* src, size_t from, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t stream) {
  return copy_rows(dst, to, src, from, width, height, stream, 0, "cudaMemcpy2DAsync");
}
cudaError_t cudaMemset(void* dst, int value, size_t bytes) {
  return result(ng_memset(dst, value, 1, bytes, nullptr, 1, "cudaMemset"));
}
cudaError_t cudaMemsetAsync(void* dst, int value, size_t bytes, cudaStream_t stream) {
  return result(ng_memset(dst, value, 1, bytes, stream, 0, "cudaMemsetAsync"));
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return give(pool, POOL); }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) { return give((uint64_t*)value, 0); }
}
