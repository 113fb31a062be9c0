/* Stands in for libcuda.so.1 and libcufile.so.0, both in one: "device" memory is malloc's.
 *
 * The declarations are those of NVIDIA's public headers, so that the compiler lays them out; what
 * it should do wrong is said by the environment variable STUB.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct { int err; int cu_err; } CUfileError_t;
typedef struct {
    int type;
    union { int fd; void *handle; } handle;
    const void *fs_ops;
} CUfileDescr_t;

static int does(const char *what) {
    const char *said = getenv("STUB");
    return said != NULL && strcmp(said, what) == 0;
}

int cuInit(unsigned flags) { return flags != 0 || does("no-device") ? 100 : 0; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "no CUDA-capable device"; return 0; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Stub %d", device); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)device << 30; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(size_t)device; return 0; }
int cuCtxSetCurrent(void *context) { return context == (void *)40 ? 0 : 201; }
int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
    *address = (unsigned long long)(size_t)aligned_alloc(4096, bytes);
    return 0;
}
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes) { memcpy((void *)(size_t)to, from, bytes); return 0; }
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes) { memcpy(to, (void *)(size_t)from, bytes); return 0; }

CUfileError_t cuFileDriverOpen(void) {
    CUfileError_t status = {0, 0};
    if (does("crash")) abort();
    if (getenv("CUFILE_ALLOW_COMPAT_MODE") == NULL) status.err = 5001;
    if (does("open")) status.err = 5026;
    return status;
}
CUfileError_t cuFileHandleRegister(void **handle, CUfileDescr_t *description) {
    CUfileError_t status = {0, 0};
    while (does("spin")) { }
    if (does("refuse")) { status.err = 5027; status.cu_err = 7; return status; }
    if (description->type != 1 || description->fs_ops != NULL) { status.err = 5022; return status; }
    *handle = (void *)(size_t)(description->handle.fd + 1000);
    return status;
}
void cuFileHandleDeregister(void *handle) { (void)handle; }
ssize_t cuFileRead(void *handle, void *base, size_t size, off_t file_offset, off_t offset) {
    if (does("short")) size /= 2;
    if (does("internal")) return -5030;
    return pread((int)((size_t)handle - 1000), (char *)base + offset, size, file_offset);
}
ssize_t cuFileWrite(void *handle, const void *base, size_t size, off_t file_offset, off_t offset) {
    if (does("lost")) return (ssize_t)size;
    return pwrite((int)((size_t)handle - 1000), (const char *)base + offset, size, file_offset);
}
