// sums.cu: an example for the emulator. A block sums 256 numbers in shared memory. ../README.md has the commands.
#include <cstdio>
#include <vector>

#if defined(__CUDACC__)  // for a GPU, what emulator.h has
#include <type_traits>
#define SHARED(name, ...) __shared__ std::type_identity_t<__VA_ARGS__> name
namespace simt {
template <class... P>
void start(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
           std::type_identity_t<P>... args) {
    kernel<<<grid, block, shared_bytes, stream>>>(args...);
}
}  // namespace simt
#endif

__global__ void sums(float* out, const float* in) {
    SHARED(part, float[256]);
    const int t = threadIdx.x;
    part[t] = in[blockIdx.x * 256 + t];
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) part[t] += part[t + half];
    }
    if (t == 0) out[blockIdx.x] = part[0];
}

int main() {
    const int blocks = 8;
    std::vector<float> in(256 * blocks), out(blocks);
    for (size_t i = 0; i < in.size(); i++) in[i] = float(i / 256);
    float *device_in, *device_out;
    cudaMalloc(&device_in, in.size() * sizeof(float));
    cudaMalloc(&device_out, out.size() * sizeof(float));
    cudaMemcpy(device_in, in.data(), in.size() * sizeof(float), cudaMemcpyHostToDevice);
    simt::start(sums, blocks, 256, 0, nullptr, device_out, device_in);
    cudaMemcpy(out.data(), device_out, out.size() * sizeof(float), cudaMemcpyDeviceToHost);
    cudaFree(device_in), cudaFree(device_out);
    int right = 0;
    for (int i = 0; i < blocks; i++) right += out[size_t(i)] == float(256 * i);
    printf("%d of %d sums are right\n", right, blocks);
    return right == blocks ? 0 : 1;
}
