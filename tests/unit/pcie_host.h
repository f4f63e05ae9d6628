// A GPU's place taken by threads of the host, so that the kernels' own source runs without one: a thread for each
// block, and in it a coroutine for each of the block's threads. It stands in front of allreduce.cu, as ptx.cuh does.
//
// What it cannot show is a GPU's memory model: the host's keeps stores in order.

#include <sched.h>
#include <ucontext.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __align__(bytes) alignas(bytes)
#define __shared__ static thread_local
#define INLINE static inline

struct Index {
  u32 x;
};
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

// ---------------------------------------------------------------------------------------------- a block

struct Coroutine {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 << 10);
  bool ended = false;
};

struct Block {
  std::vector<Coroutine> threads;
  ucontext_t scheduler;
  void (*kernel)();
  u32 current, running, at_barrier, barriers;
};
static thread_local Block block_here;

static void give_way() { swapcontext(&block_here.threads[block_here.current].context, &block_here.scheduler); }

static void pass_barrier() {
  block_here.at_barrier = 0;
  ++block_here.barriers;
}

static void __syncthreads() {
  const u32 before = block_here.barriers;
  if (++block_here.at_barrier == block_here.running) return pass_barrier();
  while (block_here.barriers == before) give_way();
}

static void run_thread() {
  block_here.kernel();
  block_here.threads[block_here.current].ended = true;
  if (--block_here.running && block_here.at_barrier == block_here.running) pass_barrier();
  give_way();
}

static void run_block(u32 index, u32 blocks, u32 threads, void (*kernel)()) {
  blockIdx.x = index, gridDim.x = blocks, blockDim.x = threads;
  Block& block = block_here;
  block.threads = std::vector<Coroutine>(threads);
  block.kernel = kernel;
  block.running = threads;
  for (Coroutine& thread : block.threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    makecontext(&thread.context, run_thread, 0);
  }
  while (block.running) {
    for (u32 i = 0; i < threads; ++i) {
      if (block.threads[i].ended) continue;
      block.current = threadIdx.x = i;
      swapcontext(&block.scheduler, &block.threads[i].context);
    }
    sched_yield();
  }
}

static void run_grid(u32 blocks, u32 threads, void (*kernel)()) {
  std::vector<std::thread> grid;
  for (u32 i = 0; i < blocks; ++i) grid.emplace_back(run_block, i, blocks, threads, kernel);
  for (std::thread& block : grid) block.join();
}

// ---------------------------------------------------------------------------------------------- CUDA's functions

static u32 min(u32 a, u32 b) { return a < b ? a : b; }
static u32 max(u32 a, u32 b) { return a > b ? a : b; }
static int __ffs(u32 bits) { return __builtin_ffs(static_cast<int>(bits)); }
static int __popc(u32 bits) { return __builtin_popcount(bits); }
static float rsqrtf(float number) { return 1 / sqrtf(number); }
static int __float2int_rn(float number) { return static_cast<int>(nearbyintf(number)); }

static u32 __float_as_uint(float number) {
  u32 bits;
  memcpy(&bits, &number, sizeof bits);
  return bits;
}

static float __uint_as_float(u32 bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

static float __fadd_rn(float a, float b) {
  const float sum = a + b;
  return sum == sum ? sum : __uint_as_float(0x7fffffff);
}

static u32 atomicAdd(u32* at, u32 more) { return __atomic_fetch_add(at, more, __ATOMIC_SEQ_CST); }
static u32 atomicExch(u32* at, u32 word) { return __atomic_exchange_n(at, word, __ATOMIC_SEQ_CST); }
static void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static void __nanosleep(u32) { give_way(); }

static void __trap() {
  printf("trapped\n");
  fflush(stdout);
  _Exit(3);
}

// ---------------------------------------------------------------------------------------------- what ptx.cuh has

INLINE void store_pair(void* to, u64 a, u64 b) {
  __atomic_store_n(static_cast<u64*>(to), a, __ATOMIC_RELAXED);
  if (rand() % 64 == 0) sched_yield();  // the two words are not one
  __atomic_store_n(static_cast<u64*>(to) + 1, b, __ATOMIC_RELAXED);
}

INLINE void load_pair(const void* from, u64& a, u64& b) {
  give_way();
  a = __atomic_load_n(static_cast<const u64*>(from), __ATOMIC_RELAXED);
  b = __atomic_load_n(static_cast<const u64*>(from) + 1, __ATOMIC_RELAXED);
}

INLINE void store_release(void* to, u32 word) { __atomic_store_n(static_cast<u32*>(to), word, __ATOMIC_RELEASE); }

INLINE u32 load_acquire(const void* from) {
  give_way();
  return __atomic_load_n(static_cast<const u32*>(from), __ATOMIC_ACQUIRE);
}

INLINE u32 load_counter(const void* from) {
  give_way();
  return __atomic_load_n(static_cast<const u32*>(from), __ATOMIC_ACQUIRE);
}

INLINE u64 now() {
  give_way();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

INLINE float from_fp16(u32 bits) {
  const unsigned short half = static_cast<unsigned short>(bits);
  _Float16 number;
  memcpy(&number, &half, sizeof number);
  return number;
}

INLINE u32 bf16_bits(float number) {
  const u32 bits = __float_as_uint(number);
  return number == number ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
}

INLINE u32 fp16_bits(float number) {
  const _Float16 half = static_cast<_Float16>(number);
  unsigned short bits;
  memcpy(&bits, &half, sizeof bits);
  return number == number ? bits : 0x7fff;
}

INLINE u32 to_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
INLINE u32 to_fp16(float low, float high) { return fp16_bits(low) | fp16_bits(high) << 16; }

INLINE float sum_of_warp(float number) {
  static thread_local float sums[32];
  float total = 0;
  sums[threadIdx.x / 32] = 0;
  __syncthreads();
  sums[threadIdx.x / 32] += number;
  __syncthreads();
  total = sums[threadIdx.x / 32];
  __syncthreads();
  return total;
}

INLINE float* shared_memory() {
  static thread_local float memory[16 << 10];
  return memory;
}
