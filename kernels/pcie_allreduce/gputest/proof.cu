// Payloads that every rank can compute by itself, and kernels that send and check them. Compiled behind allreduce.cu.
//
// A rank's stream only ever waits for other ranks inside the allreduce, so that nothing hides what its calls do to each
// other. The expected sum is computed here by other means than in the kernels under test.

INLINE u32 mixed(u32 x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Between a block's stores and its reads, now and then and for half of all calls, a warp rests: what comes meanwhile
// must find room.
static __device__ __noinline__ void pause(u32 epoch, u32 rank, u32 block) {
  const u32 draw = mixed(mixed(epoch * RANKS + rank) + block * 32 + threadIdx.x / 32);
  if (epoch / 256 % 2 || draw % 32) return;
  const u64 until = now() + draw / 32 % 16384;
  while (now() < until) {}
}

// What call `call` does, known to all ranks.
struct Plan {
  u32 kind, blocks, grains, draw;
};

INLINE bool by_packets(u32 kind) { return kind == 0 || kind == 4 || kind == 8; }

// Words 2i and 2i + 1 have one character: they make one 64-bit word of the mailbox.
INLINE u32 payload(u32 call, u32 rank, u32 i) {
  const u32 character = mixed(call * 0x9e3779b9u + i / 2) % 32;
  const u32 draw = mixed(mixed(call * 0x85ebca6bu + rank) + i);
  const u32 sign = DTYPE == FP32 ? 0x80000000u : 0x80008000u;
  const u32 tiny = DTYPE == FP32 ? 0x007fffffu : DTYPE == BF16 ? 0x007f007fu : 0x03ff03ffu;
  if (character == 0) return sign;                   // -0 from all
  if (character == 1) return draw & sign;            // either zero
  if (character == 2) return draw % 2 ? ~0u : draw;  // often the sentinel
  if (character == 3) return draw;                   // anything: NaN, infinity
  if (character == 4) return draw & (sign | tiny);   // denormals
  if (character == 5) return call;                   // looks like an epoch
  if (DTYPE == FP32) return (draw & 0x807fffffu) | 0x3f800000u;
  const u32 one = DTYPE == BF16 ? 0x3f803f80u : 0x3c003c00u;
  return (draw & (DTYPE == BF16 ? 0x80ff80ffu : 0x8bff8bffu)) | one;
}

INLINE float number_of(u32 word, u32 i) {
  if (DTYPE == FP32) return __uint_as_float(word);
  const u32 bits = i ? word >> 16 : word & 0xffff;
  if (DTYPE == BF16) return __uint_as_float(bits << 16);
  const u32 exponent = bits >> 10 & 31, fraction = bits & 0x3ff, sign = (bits & 0x8000) << 16;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  const float magnitude = exponent ? __uint_as_float((exponent + 112) << 23 | fraction << 13)
                                   : static_cast<float>(fraction) * __uint_as_float(103u << 23);
  return __uint_as_float(sign | __float_as_uint(magnitude));
}

INLINE u32 bits_of(float number) {
  const u32 bits = __float_as_uint(number);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  if (DTYPE == FP32) return nan ? 0x7fffffffu : bits;
  if (nan) return 0x7fff;
  if (DTYPE == BF16) return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const u32 sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffffu;
  if (rest >= 0x477ff000u) return sign | 0x7c00;  // 65520 and above
  if (rest >= 0x38800000u) return sign | ((rest - 0x38000000u + 0xfff + (rest >> 13 & 1)) >> 13);
  // Denormals: steps of 2^-24, to the nearest even one.
  return sign | static_cast<u32>(__float2int_rn(__uint_as_float(rest) * 16777216.0f));
}

INLINE u32 expected(u32 call, u32 i) {
  u32 word = 0;
  for (u32 e = 0; e < PER; ++e) {
    float total = number_of(payload(call, 0, i), e);
    for (u32 rank = 1; rank < RANKS; ++rank) total = __fadd_rn(total, number_of(payload(call, rank, i), e));
    word |= bits_of(total) << 16 * e;
  }
  return word;
}

constexpr u32 CANARY = 0xdeadbeefu;
constexpr u32 MARGIN = 4;  // words of it on either side of a result

struct Faults {
  u32 count, call, rank, index, got, want, kind, done;
};

INLINE void complain(Faults* faults, u32 call, u32 rank, u32 index, u32 got, u32 want, u32 kind) {
  if (atomicAdd(&faults->count, 1)) return;
  faults->call = call;
  faults->rank = rank;
  faults->index = index;
  faults->got = got;
  faults->want = want;
  faults->kind = kind;
}

INLINE void send_words(u32* in, u32* out, u32 call, u32 rank, u32 words, u32 thread, u32 threads) {
  for (u32 i = thread; i < words; i += threads) in[i] = payload(call, rank, i);
  if (thread < MARGIN) {
    out[-1 - static_cast<int>(thread)] = CANARY;
    out[words + thread] = CANARY;
  }
}

INLINE void check_words(const u32* out, u32 call, u32 rank, u32 words, u32 kind, Faults* faults, u32 thread, u32 threads) {
  for (u32 i = thread; i < words + 2 * MARGIN; i += threads) {
    const bool inside = i >= MARGIN && i < words + MARGIN;
    const u32 want = inside ? expected(call, i - MARGIN) : CANARY;
    const u32 got = out[static_cast<int>(i) - static_cast<int>(MARGIN)];
    if (got != want) complain(faults, call, rank, i, got, want, kind);
  }
}

// For streams and processes. `calls` counts the calls of this rank; one block each.
extern "C" __global__ void fill(u32* in, u32* out, u32 words, u32 rank, const u32* calls) {
  send_words(in, out, *calls, rank, words, threadIdx.x, blockDim.x);
}

extern "C" __global__ void check(const u32* out, u32 words, u32 rank, u32 kind, u32* calls, Faults* faults) {
  const u32 call = *calls;
  check_words(out, call, rank, words, kind, faults, threadIdx.x, blockDim.x);
  __syncthreads();
  if (threadIdx.x == 0) *calls = call + 1;
}

extern "C" __global__ void hold(u64 nanoseconds) {
  const u64 until = now() + nanoseconds;
  while (now() < until) {}
}

extern "C" __global__ void nothing() {}

// For one launch of all ranks that makes many calls: what stands between two kernels of a stream.
INLINE void kernel_boundary(u32* arrived, u32 target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1);
    while (load_counter(arrived) < target) {}
    __threadfence();
  }
  __syncthreads();
}

INLINE Plan plan_of(u32 call, u32 blocks, u32 most_grains, u32 kinds) {
  Plan plan;
  plan.draw = mixed(call + 0x51ed270bu);
  u32 nth = mixed(plan.draw) % __popc(kinds);
  for (plan.kind = 0; !(kinds >> plan.kind & 1) || nth--; ++plan.kind) {}
  plan.blocks = 1 + mixed(plan.draw + 1) % blocks;
  const u32 most = by_packets(plan.kind) ? min(most_grains, PACKET_UNITS / 2) : most_grains;
  // Sizes of all magnitudes, and often the same one for some calls on end.
  const u32 size = mixed((plan.draw % 4 ? call / 8 : call) + 0xabcdefu);
  plan.grains = 1 + mixed(size) % max(1u, most >> (size % 10));
  return plan;
}

struct Soak {
  Launch launch;  // `in` and `out` with room for the largest message and the margins
  u32* arrived;   // a counter for each rank, zero
  Faults* faults;
  u32 first;
  u32 calls;
  u32 most_grains;
  u32 kinds;      // a bit for each
  u32 delay;      // nanoseconds, at most
};

extern "C" __global__ void __launch_bounds__(MAX_THREADS) soak(const __grid_constant__ Soak soak) {
  const u32 blocks = gridDim.x / RANKS;
  const u32 r = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const u32 thread = block * blockDim.x + threadIdx.x, threads = blocks * blockDim.x;
  Rank at = soak.launch.of[r];
  u32* const in = static_cast<u32*>(const_cast<void*>(at.in));
  u32* const out = static_cast<u32*>(at.out);
  u32 boundaries = 0;
  for (u32 n = soak.first; n < soak.first + soak.calls; ++n) {
    const Plan plan = plan_of(n, blocks, soak.most_grains, soak.kinds);
    const bool in_place = plan.draw % 8 == 1;
    at.grains = plan.grains;
    const u32 units = by_packets(plan.kind) ? 2 * plan.grains : plan.grains;
    at.share = (units + plan.blocks - 1) / plan.blocks;
    at.kernel = plan.kind;
    u32* const from = in_place ? out : in;
    at.in = from;
    send_words(from, out, n, r, 4 * plan.grains, thread, threads);
    kernel_boundary(soak.arrived + r, ++boundaries * blocks);
    // Now and then a rank or a block is late.
    const u32 late = mixed(n * RANKS + r);
    if (soak.delay && (late % 8 == 0 || mixed(late + block) % 16 == 0)) {
      const u64 until = now() + late / 16 % soak.delay;
      while (now() < until) {}
      __syncthreads();
    }
    if (block < plan.blocks) {
      Call call(at, block, plan.blocks);
      switch (plan.kind) {
        case 0: one_shot<Push<Packets>>(call); break;
        case 1: one_shot<Push<Sentinels>>(call); break;
        case 2: one_shot<Flagged<false>>(call); break;
        case 3: one_shot<Flagged<true>>(call); break;
        case 4: two_shot<Push<Packets>>(call); break;
        case 5: two_shot<Push<Sentinels>>(call); break;
        case 6: two_shot<Flagged<false>>(call); break;
        case 7: two_shot<Flagged<true>>(call); break;
#if RANKS >= 4
        case 8: island<Packets>(call); break;
        case 9: island<Sentinels>(call); break;
#endif
      }
      call.finish();
    }
    kernel_boundary(soak.arrived + r, ++boundaries * blocks);
    check_words(out, n, r, 4 * plan.grains, plan.kind, soak.faults, thread, threads);
    // The next payload goes where this one was checked, by other threads.
    kernel_boundary(soak.arrived + r, ++boundaries * blocks);
  }
  if (block == 0 && threadIdx.x == 0) atomicAdd(&soak.faults->done, 1);
}
