// mock_nvml.c: a replacement for NVML, libnvidia-ml.so.1, which needs no GPU. test_nvml.sh builds it.
//
// A GPU is a file in the folder $MOCK_NVML, with the name of its place on the PCI bus. The file has the results of the
// calls, which may change during a run: "temperature 87" is a value, "temperature error 15" an error, and a value
// without a line is not supported. With -DOLD the library is that of an old driver: the clock's limits have their old
// name, and there is no power.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

static char paths[64][512];  // of the GPUs that were found; a handle points to one
static int count;

static int get(const char* path, const char* name, unsigned long long* value) {
    FILE* file = fopen(path, "r");
    if (!file) return NOT_FOUND;
    int result = NOT_SUPPORTED;
    char line[256];
    const size_t length = strlen(name);
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, name, length) != 0 || line[length] != ' ') continue;
        const char* text = line + length + 1;
        const int is_error = strncmp(text, "error ", 6) == 0;
        if (is_error) result = atoi(text + 6);
        if (!is_error) *value = strtoull(text, NULL, 10), result = SUCCESS;
    }
    fclose(file);
    return result;
}

static int get_unsigned(void* gpu, const char* name, unsigned* value) {
    unsigned long long number = 0;
    const int result = get(gpu, name, &number);
    if (result == SUCCESS) *value = (unsigned)number;
    return result;
}

int nvmlInit_v2(void) {
    const char* error = getenv("MOCK_NVML_INIT");
    return error ? atoi(error) : SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** gpu) {
    snprintf(paths[count], sizeof paths[count], "%s/%s", getenv("MOCK_NVML"), bus_id);
    FILE* file = fopen(paths[count], "r");
    if (!file) return NOT_FOUND;
    fclose(file);
    *gpu = paths[count++];
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char* text, unsigned length) {
    snprintf(text, length, "580.65.06");
    return SUCCESS;
}

const char* nvmlErrorString(int error) {
    return error == 15 ? "GPU is lost" : error == 6 ? "Not Found" : "Unknown Error";
}

int nvmlDeviceGetTemperature(void* gpu, int sensor, unsigned* celsius) {
    return sensor == 0 ? get_unsigned(gpu, "temperature", celsius) : NOT_SUPPORTED;
}
int nvmlDeviceGetClockInfo(void* gpu, int type, unsigned* mhz) {
    return type == 1 ? get_unsigned(gpu, "sm_clock", mhz) : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxClockInfo(void* gpu, int type, unsigned* mhz) {
    return type == 1 ? get_unsigned(gpu, "max_sm_clock", mhz) : NOT_SUPPORTED;
}
#ifdef OLD
int nvmlDeviceGetCurrentClocksThrottleReasons(void* gpu, unsigned long long* bits) { return get(gpu, "limits", bits); }
#else
int nvmlDeviceGetPowerUsage(void* gpu, unsigned* milliwatts) { return get_unsigned(gpu, "power", milliwatts); }
int nvmlDeviceGetCurrentClocksEventReasons(void* gpu, unsigned long long* bits) { return get(gpu, "limits", bits); }
#endif
