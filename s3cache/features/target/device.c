/* A stand-in for a GPU: the parts of CUDA's driver, runtime and cuBLAS that torch and Triton use.

   Loaded before a CUDA build of torch (LD_PRELOAD), it serves as libcuda.so.1 and replaces the
   functions of libcudart that torch calls. Device memory is host memory. A module loads if it is for
   the architecture of the device. Kernels do nothing, and every measurement takes the same time.

   S3CACHE_STANDIN has the properties of the device, as "major=9;minor=0;...": names and values are
   those of torch.cuda.get_device_properties. With "load_fails=CODE:COUNT", the first COUNT modules
   fail to load with error CODE.

   s3cache_launches() returns how often this thread has called a function that would compute. All
   other functions are in nothing.c, which s3cache/features/target/standin.py writes: they return success,
   and calls that would compute are counted. */

#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t FLUSHES = 32ull << 20;

static __thread unsigned long launches;
static __thread unsigned long long capture; /* of the graph that is captured, or 0 */

unsigned long s3cache_launches(void) { return launches; }
int s3cache_launch(void) { return launches++, 0; }

/* Returns the text behind "name=" in S3CACHE_STANDIN, or NULL. */
static const char *said(const char *name) {
  size_t size = strlen(name);
  for (const char *at = getenv("S3CACHE_STANDIN"); at; at = strchr(at, ';')) {
    at += *at == ';';
    if (!strncmp(at, name, size) && at[size] == '=') return at + size + 1;
  }
  return NULL;
}

static long long number(const char *name, long long otherwise) {
  const char *text = said(name);
  if (!text) return otherwise;
  return strncmp(text, "True", 4) ? atoll(text) : 1;
}

static int devices(void) { return number("count", 1); }
static int capability(void) { return 10 * number("major", 9) + number("minor", 0); }
static int driver(void) { return number("driver", CUDA_VERSION); }
static int warp(void) { return number("warp_size", 32); }
static int threads(void) { return number("max_threads_per_block", 1024); }
static size_t memory(void) { return number("total_memory", 80ll << 30); }

static CUresult copy_name(char *to, size_t size) {
  const char *name = said("name");
  return snprintf(to, size, "%.*s", name ? (int)strcspn(name, ";") : 0, name), CUDA_SUCCESS;
}

/* -- the driver */

CUresult cuDriverGetVersion(int *version) { return *version = driver(), CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = devices(), CUDA_SUCCESS; }
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
  return copy_name(to, size);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  static const struct { CUdevice_attribute attribute; const char *name; } SAID[] = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, "major"},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, "minor"},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, "multi_processor_count"},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, "shared_memory_per_block"},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, "shared_memory_per_block_optin"},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, "shared_memory_per_multiprocessor"},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, "max_num_regs"},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, "regs_per_multiprocessor"},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, "max_threads_per_block"},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, "max_threads_per_multi_processor"},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, "warp_size"},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, "L2_cache_size"},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, "clock_rate"},
      {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, "memory_clock_rate"},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, "memory_bus_width"},
      {CU_DEVICE_ATTRIBUTE_INTEGRATED, "is_integrated"},
      {CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD, "is_multi_gpu_board"},
  };
  *value = 1;
  for (size_t i = 0; i < sizeof SAID / sizeof *SAID; i++)
    if (SAID[i].attribute == attribute) *value = number(SAID[i].name, 0);
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

/* A kernel, which is a module too: Triton makes one of each. */
struct kernel { int registers, local; };

/* Reads the notes of the assembler in .nv.info: pairs of a symbol and a number. */
static void read_needs(const char *image, struct kernel *to) {
  const Elf64_Ehdr *header = (const void *)image;
  const Elf64_Shdr *sections = (const void *)(image + header->e_shoff);
  const char *names = image + sections[header->e_shstrndx].sh_offset;
  for (int i = 0; i < header->e_shnum; i++) {
    if (strcmp(names + sections[i].sh_name, ".nv.info")) continue;
    const unsigned char *at = (const void *)(image + sections[i].sh_offset);
    const unsigned char *end = at + sections[i].sh_size;
    while (at + 4 <= end) {
      int format = at[0], attribute = at[1], size = format == 4 ? at[2] | at[3] << 8 : 0, value;
      memcpy(&value, at + 8, size >= 8 ? sizeof value : 0);
      if (size >= 8 && attribute == 0x2f && value > to->registers) to->registers = value;
      if (size >= 8 && attribute == 0x11 && value > to->local) to->local = value;
      at += 4 + size;
    }
  }
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  static int loads;
  int code = 0, count = 0;
  const char *fails = said("load_fails");
  if (fails && sscanf(fails, "%d:%d", &code, &count) == 2 && loads++ < count) return code;
  unsigned flags; /* of the ELF header: the architecture, in one of two places */
  memcpy(&flags, (const char *)image + 48, sizeof flags);
  if (memcmp(image, "\177ELF", 4)) return CUDA_ERROR_INVALID_IMAGE;
  int first = flags & 0xff, second = flags >> 8 & 0xff;
  if (first != capability() && second != capability()) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  struct kernel *kernel = calloc(1, sizeof *kernel);
  read_needs(image, kernel);
  return *module = (CUmodule)kernel, CUDA_SUCCESS;
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
  return *function = (CUfunction)module, CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  const struct kernel *kernel = (const void *)function;
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS                ? kernel->registers
           : attribute == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES      ? kernel->local
           : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? threads()
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
  return *status = capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : 0, CUDA_SUCCESS;
}

/* -- the runtime */

static __thread int current;

cudaError_t cudaGetDeviceCount(int *count) { return *count = devices(), cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = RUNTIME, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = driver(), cudaSuccess; }

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return cudaErrorInvalidDevice;
  return current = device, cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *to, int device) {
  memset(to, 0, sizeof *to);
  copy_name(to->name, sizeof to->name);
  to->major = number("major", 9);
  to->minor = number("minor", 0);
  to->multiProcessorCount = number("multi_processor_count", 1);
  to->totalGlobalMem = memory();
  to->regsPerMultiprocessor = number("regs_per_multiprocessor", 0);
  to->regsPerBlock = number("max_num_regs", 0);
  to->maxThreadsPerMultiProcessor = number("max_threads_per_multi_processor", 0);
  to->maxThreadsPerBlock = threads();
  to->warpSize = warp();
  to->sharedMemPerBlock = number("shared_memory_per_block", 0);
  to->sharedMemPerBlockOptin = number("shared_memory_per_block_optin", 0);
  to->sharedMemPerMultiprocessor = number("shared_memory_per_multiprocessor", 0);
  to->l2CacheSize = number("L2_cache_size", 0);
  to->integrated = number("is_integrated", 0);
  to->isMultiGpuBoard = number("is_multi_gpu_board", 0);
  to->maxGridSize[0] = 2147483647;
  to->maxGridSize[1] = to->maxGridSize[2] = 65535;
  for (int i = 0; i < 3; i++) to->maxThreadsDim[i] = i < 2 ? threads() : 64;
  to->memoryBusWidth = number("memory_bus_width", 0);
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
  return *unused = memory() / 8 * 7, *total = memory(), cudaSuccess;
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
  else launches++;
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
  return *status = capture ? cudaStreamCaptureStatusActive : 0, cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  static unsigned long long captures;
  return capture = ++captures, cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  return *graph = malloc(8), capture = 0, cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  return *count = 1, cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *to, cudaGraph_t graph, unsigned long long flags) {
  return *to = malloc(8), cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *to, cudaGraph_t graph,
                                          unsigned long long flags) {
  return *to = malloc(8), cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  if (id) *id = capture;
  if (graph) *graph = NULL;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  return *event = malloc(8), cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return *milliseconds = 50, cudaSuccess; /* long, so that a benchmark repeats it rarely */
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *to, const void *function) {
  memset(to, 0, sizeof *to);
  to->maxThreadsPerBlock = threads();
  to->binaryVersion = to->ptxVersion = capability();
  to->numRegs = warp();
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

/* -- cuBLAS, without its headers: its handles are never used */

int cublasCreate_v2(void **handle) { return *handle = (void *)64, 0; }
int cublasLtCreate(void **handle) { return *handle = (void *)64, 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c,
                                   void *d, void *preference, int asked, void *result, int *count) {
  memset(result, 0, 96);
  return *count = 1, 0;
}
