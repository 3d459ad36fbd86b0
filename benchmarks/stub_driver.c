/* CUDA's driver without a GPU: it records what it is asked for, and runs nothing.

   The functions are those that Triton's launcher calls. A launch and a TMA descriptor are stored as
   they arrive, and `stub_driver.py` reads them. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define MOST_RECORDS 65536

typedef struct {
  int module, dynamic_shared, allowed_shared, cluster;
  unsigned grid[3], block[3];
} Launch;

typedef struct {
  int type, rank, swizzle;
  unsigned long long address, sizes[5], strides[5];
  unsigned box[5], steps[5];
} Descriptor;

typedef struct {
  int module, allowed_shared;
} Function;

Launch stub_launches[MOST_RECORDS];
Descriptor stub_descriptors[MOST_RECORDS];
int stub_num_launches, stub_num_descriptors, stub_num_modules, stub_recording = 1;

/* Set by `stub_driver.py` before the first call. */
int stub_capability, stub_shared_limit, stub_multiprocessors;
char stub_folder[4096];

static CUcontext current;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
  *version = 13020;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "refused by the stub driver";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute name, CUdevice device) {
  switch (name) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = stub_capability / 10; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = stub_capability % 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = stub_shared_limit; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = stub_shared_limit + 1024;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = stub_multiprocessors; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit name) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit name, size_t value) { return CUDA_SUCCESS; }

/* Each pointer is taken for one of a GPU's memory. */
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute name, CUdeviceptr pointer) {
  if (name == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr *)value = pointer;
  else
    *(int *)value = 0;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(
    unsigned count, CUpointer_attribute *names, void **values, CUdeviceptr pointer) {
  for (unsigned i = 0; i < count; i++)
    cuPointerGetAttribute(values[i], names[i], pointer);
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

/* The image is an ELF file. Its size is the end of its last part. */
static size_t size_of_image(const unsigned char *image) {
  unsigned long long headers, offset, size, end = 0;
  unsigned short header_size, count;
  memcpy(&headers, image + 0x28, 8);
  memcpy(&header_size, image + 0x3a, 2);
  memcpy(&count, image + 0x3c, 2);
  for (int i = 0; i < count; i++) {
    const unsigned char *header = image + headers + (size_t)i * header_size;
    unsigned kind;
    memcpy(&kind, header + 4, 4);
    memcpy(&offset, header + 24, 8);
    memcpy(&size, header + 32, 8);
    if (kind != 8 && offset + size > end) /* 8: no bytes in the file */
      end = offset + size;
  }
  size = headers + (unsigned long long)count * header_size;
  memcpy(&offset, image + 0x20, 8); /* program headers */
  memcpy(&header_size, image + 0x36, 2);
  memcpy(&count, image + 0x38, 2);
  if (offset + (unsigned long long)count * header_size > size)
    size = offset + (unsigned long long)count * header_size;
  return size > end ? size : end;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  char path[4200];
  snprintf(path, sizeof(path), "%s/%d.cubin", stub_folder, stub_num_modules);
  FILE *file = fopen(path, "wb");
  size_t size = size_of_image(image);
  if (file == NULL || fwrite(image, 1, size, file) != size || fclose(file))
    return CUDA_ERROR_INVALID_IMAGE;
  stub_num_modules++;
  *module = (CUmodule)(long)stub_num_modules; /* not NULL */
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  Function *found = calloc(1, sizeof(Function));
  if (found == NULL)
    return CUDA_ERROR_OUT_OF_MEMORY;
  found->module = (int)(long)module - 1;
  found->allowed_shared = 49152;
  *function = (CUfunction)found;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute name, CUfunction function) {
  *value = name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute name, int value) {
  if (name == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value > stub_shared_limit)
      return CUDA_ERROR_INVALID_VALUE;
    ((Function *)function)->allowed_shared = value;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(
    int *clusters, CUfunction function, const CUlaunchConfig *config) {
  *clusters = 1;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(
    const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  if (!stub_recording)
    return CUDA_SUCCESS;
  if (stub_num_launches == MOST_RECORDS)
    return CUDA_ERROR_OUT_OF_MEMORY;
  const Function *called = (const Function *)function;
  int cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      cluster = config->attrs[i].value.clusterDim.x * config->attrs[i].value.clusterDim.y *
                config->attrs[i].value.clusterDim.z;
  stub_launches[stub_num_launches++] = (Launch){
      called->module,
      config->sharedMemBytes,
      called->allowed_shared,
      cluster,
      {config->gridDimX, config->gridDimY, config->gridDimZ},
      {config->blockDimX, config->blockDimY, config->blockDimZ},
  };
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
    const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (rank < 1 || rank > 5)
    return CUDA_ERROR_INVALID_VALUE;
  if (!stub_recording)
    return CUDA_SUCCESS;
  if (stub_num_descriptors == MOST_RECORDS)
    return CUDA_ERROR_OUT_OF_MEMORY;
  Descriptor *kept = &stub_descriptors[stub_num_descriptors++];
  *kept = (Descriptor){type, rank, swizzle, (unsigned long long)address};
  for (unsigned i = 0; i < rank; i++) {
    kept->sizes[i] = sizes[i];
    kept->box[i] = box[i];
    kept->steps[i] = steps[i];
    if (i + 1 < rank)
      kept->strides[i] = strides[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeIm2col(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *sizes, const cuuint64_t *strides, const int *lower, const int *upper,
    cuuint32_t channels, cuuint32_t pixels, const cuuint32_t *steps,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
