#!/usr/bin/env bash
# build.sh VENV OUT: the stand-in of device.c for the CUDA build of torch that is in VENV.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
packages=$(echo "$1"/lib/python3*/site-packages)
headers=$(echo "$packages"/nvidia/cu[0-9]*/include)
mkdir -p "$2/crt"
cd "$2"

# The wheels lack the header that tells compilers of device code apart.
cat >crt/host_defines.h <<'H'
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
H
cc -Wall -Wno-deprecated-declarations -O1 -fPIC -I. -I"$headers" -c "$here/device.c"

# What torch and Triton call beside that returns success and does nothing. Of the driver they ask by
# name, all at once.
{
	nm -D --undefined-only "$packages"/torch/lib/lib{torch_cuda,c10_cuda,torch_python}.so |
		sed -n 's/.* U \(cuda[A-Z][A-Za-z0-9_]*\|cublas[A-Za-z0-9_]*\).*/\1/p'
	tr ' ' '\n' <<<"cuInit cuModuleUnload cuLaunchKernel cuLaunchKernelEx cuLaunchCooperativeKernel
cuFuncSetAttribute cuFuncSetCacheConfig cuCtxSetCurrent cuCtxSynchronize cuCtxPushCurrent cuCtxPopCurrent
cuCtxFromGreenCtx cuCtxGetLimit cuCtxSetLimit cuDevicePrimaryCtxSetFlags_v2 cuDeviceGetUuid
cuOccupancyMaxActiveClusters cuTensorMapEncodeTiled cuLinkCreate cuLinkAddData cuLinkComplete
cuLinkDestroy cuMemAddressReserve cuMemAddressFree cuMemCreate cuMemMap cuMemUnmap cuMemRelease
cuMemSetAccess cuMemGetAddressRange cuMemGetAllocationGranularity cuMemsetD32Async
cuMemGetAllocationPropertiesFromHandle cuMemRetainAllocationHandle cuMemExportToShareableHandle
cuMemImportFromShareableHandle cuMulticastCreate cuMulticastAddDevice cuMulticastBindMem
cuMulticastUnbind cuStreamWriteValue32 cuStreamGetCtx cuPointerGetAttributes cuKernelGetAttribute
cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxStreamCreate cuDeviceGetDevResource
cuDevSmResourceSplitByCount cuDevResourceGenerateDesc cuLogsRegisterCallback cuLogsUnregisterCallback"
} | sort -u | grep -vxFf <(nm --defined-only device.o | awk '{ print $3 }') |
	sed 's/.*/int &(void) { return 0; }/' >nothing.c
cc -O1 -fPIC -w -c nothing.c
cc -shared -Wl,-soname,libcuda.so.1 device.o nothing.o -o libcuda.so.1 -ldl
