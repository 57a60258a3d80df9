/* A GPU that is not there: CUDA's driver, runtime and cuBLAS, as far as torch and Triton ask them.

   Loaded before a CUDA build of torch (LD_PRELOAD), it is libcuda.so.1 and takes the place of what
   torch calls in libcudart. Memory is the host's. A module is loaded if it is for the architecture
   that there is; kernels do nothing, and each measurement takes the same time.

   FAKE_CC, FAKE_SMS, FAKE_SMEM, FAKE_NAME, FAKE_DRIVER  what the device says of itself
   FAKE_LOAD_FAILS=CODE:COUNT                            so many first modules fail with that error

   Functions that have nothing to say are in nothing.c, which build.sh makes: they return success. */

#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICES = 8, REGISTERS = 65536, THREADS = 1024, WARP = 32 };
enum { SHARED = 49152, SHARED_OF_ALL = 233472 };
static const size_t TOTAL = 80ull << 30, FLUSHES = 32ull << 20;

static int set(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}

static int capability(void) { return set("FAKE_CC", 90); }
static int processors(void) { return set("FAKE_SMS", 132); }
static int shared_optin(void) { return set("FAKE_SMEM", 232448); }
static int driver(void) { return set("FAKE_DRIVER", 13020); }

static const char *name(void) {
  const char *value = getenv("FAKE_NAME");
  return value ? value : "NVIDIA H100 80GB HBM3";
}

/* -- the driver */

CUresult cuDriverGetVersion(int *version) { return *version = driver(), CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = DEVICES, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { return *device = index, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return cuCtxGetCurrent(context);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  return *active = 1, CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *to, int size, CUdevice device) {
  return snprintf(to, size, "%s", name()), CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability() / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability() % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = processors(); break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = shared_optin(); break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = SHARED_OF_ALL; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = REGISTERS; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = THREADS; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = WARP; break;
    default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
  return *text = "CUDA_ERROR_OF_THE_STAND_IN", CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  switch (error) {
    case CUDA_ERROR_OUT_OF_MEMORY: *text = "out of memory"; break;
    case CUDA_ERROR_NOT_INITIALIZED: *text = "initialization error"; break;
    case CUDA_ERROR_INVALID_IMAGE: *text = "device kernel image is invalid"; break;
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
      *text = "no kernel image is available for execution on the device"; break;
    default: *text = "unknown error";
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  static int loads;
  int code = 0, count = 0;
  const char *fails = getenv("FAKE_LOAD_FAILS");
  if (fails && sscanf(fails, "%d:%d", &code, &count) == 2 && loads++ < count) return code;
  unsigned flags; /* of the ELF header: the architecture, in one of two places */
  memcpy(&flags, (const char *)image + 48, sizeof flags);
  if (memcmp(image, "\177ELF", 4)) return CUDA_ERROR_INVALID_IMAGE;
  int first = flags & 0xff, second = flags >> 8 & 0xff;
  if (first != capability() && second != capability()) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  return *module = calloc(1, 64), CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count,
                            CUjit_option *options, void **values) {
  return cuModuleLoadData(module, image);
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  char *image = calloc(1, 8 << 20);
  CUresult result = fread(image, 1, 8 << 20, file) > 64 ? cuModuleLoadData(module, image)
                                                        : CUDA_ERROR_INVALID_IMAGE;
  free(image);
  fclose(file);
  return result;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  return *function = calloc(1, 64), CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS                ? WARP
           : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? THREADS
                                                                  : 0;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int size,
                                                     size_t shared) {
  return *count = 2, CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *to, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)to = pointer;
  else *(unsigned *)to = 0;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}

/* -- the runtime */

static __thread int current;

cudaError_t cudaGetDeviceCount(int *count) { return *count = DEVICES, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = driver(), cudaSuccess; }

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= DEVICES) return cudaErrorInvalidDevice;
  return current = device, cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *to, int device) {
  memset(to, 0, sizeof *to);
  snprintf(to->name, sizeof to->name, "%s", name());
  to->major = capability() / 10;
  to->minor = capability() % 10;
  to->multiProcessorCount = processors();
  to->totalGlobalMem = TOTAL;
  to->regsPerMultiprocessor = to->regsPerBlock = REGISTERS;
  to->maxThreadsPerMultiProcessor = 2 * THREADS;
  to->maxThreadsPerBlock = THREADS;
  to->warpSize = WARP;
  to->sharedMemPerBlock = SHARED;
  to->sharedMemPerBlockOptin = shared_optin();
  to->sharedMemPerMultiprocessor = SHARED_OF_ALL;
  to->l2CacheSize = 50 << 20;
  to->maxGridSize[0] = 2147483647;
  to->maxGridSize[1] = to->maxGridSize[2] = 65535;
  for (int i = 0; i < 3; i++) to->maxThreadsDim[i] = i < 2 ? THREADS : 64;
  to->memoryBusWidth = 5120;
  to->textureAlignment = 512;
  to->concurrentKernels = to->unifiedAddressing = to->cooperativeLaunch = 1;
  to->pciDeviceID = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  return (cudaError_t)cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device);
}

cudaError_t cudaMalloc(void **to, size_t size) {
  if (posix_memalign(to, 512, size ? size : 512)) return cudaErrorMemoryAllocation;
  if (size < FLUSHES) memset(*to, 0, size);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void **to, size_t size) { return cudaMalloc(to, size); }
cudaError_t cudaHostAlloc(void **to, size_t size, unsigned flags) { return cudaMalloc(to, size); }
cudaError_t cudaFree(void *memory) { return free(memory), cudaSuccess; }
cudaError_t cudaFreeHost(void *memory) { return cudaFree(memory); }

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  return *unused = TOTAL - (10ull << 30), *total = TOTAL, cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return memmove(to, from, size), cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  return memmove(to, from, size), cudaSuccess;
}

/* A benchmark empties the device's cache before each run with a memset of hundreds of megabytes. */
cudaError_t cudaMemsetAsync(void *memory, int value, size_t size, cudaStream_t stream) {
  if (size < FLUSHES) memset(memory, value, size);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *to, const void *pointer) {
  memset(to, 0, sizeof *to);
  to->type = cudaMemoryTypeDevice;
  to->device = current;
  to->devicePointer = (void *)pointer;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  return *can = 0, cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return *stream = malloc(8), cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  return *priority = 0, cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  if (id) *id = 0;
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  return *event = malloc(8), cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return *milliseconds = 50, cudaSuccess; /* so long that a benchmark repeats it seldom */
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *to, const void *function) {
  memset(to, 0, sizeof *to);
  to->maxThreadsPerBlock = THREADS;
  to->binaryVersion = to->ptxVersion = capability();
  to->numRegs = WARP;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function,
                                                                   int size, size_t shared,
                                                                   unsigned flags) {
  return *count = 2, cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
  return call(data), cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

/* -- cuBLAS; its headers are not asked, as its handles are nothing here */

int cublasCreate_v2(void **handle) { return *handle = (void *)64, 0; }
int cublasLtCreate(void **handle) { return *handle = (void *)64, 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c,
                                   void *d, void *preference, int asked, void *result, int *count) {
  memset(result, 0, 96);
  return *count = 1, 0;
}
