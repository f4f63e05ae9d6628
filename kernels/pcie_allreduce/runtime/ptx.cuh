// What the kernels need of the GPU beyond C++: how memory is reached, the clock, conversions. Compiled in front of
// allreduce.cu by NVRTC, so nothing is included.

typedef unsigned int u32;
typedef unsigned long long u64;

#define INLINE static __device__ __forceinline__

INLINE void store_pair(void* to, u64 a, u64 b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "l"(a), "l"(b)
               : "memory");
}

INLINE void load_pair(const void* from, u64& a, u64& b) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(a), "=l"(b)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
}

INLINE void store_release(void* to, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(value) : "memory");
}

INLINE u32 load_acquire(const void* from) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return value;
}

INLINE u32 load_counter(const void* from) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return value;
}

INLINE u64 now() {
  u64 nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

// The fp16 number in the low half of a word.
INLINE float from_fp16(u32 bits) {
  float number;
  asm("{ .reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(number) : "r"(bits));
  return number;
}

// Two numbers rounded to the nearest, ties to even.
INLINE u32 to_bf16(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

INLINE u32 to_fp16(float low, float high) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// All threads of a warp get the sum.
INLINE float sum_of_warp(float number) {
#pragma unroll
  for (u32 i = 16; i; i /= 2) number += __shfl_xor_sync(~0u, number, i);
  return number;
}

// The memory that the launch gives a block.
INLINE float* shared_memory() {
  extern __shared__ float memory[];
  return memory;
}
