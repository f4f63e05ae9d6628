// Allreduce of small messages through mailboxes. ptx.cuh comes before it.
//
// The layout's macros (RANKS, SLOT_BYTES, PACKETS and so on) come from layout.py. DTYPE is the element's type, and
// VIRTUAL how many ranks one launch stands for: 1, or all of them where ranks share a GPU.

#define FP32 0
#define BF16 1
#define FP16 2

// Where tests hold warps up.
#ifndef PAUSE
#define PAUSE(call)
#endif

constexpr u32 PER = DTYPE == FP32 ? 1 : 2;        // elements of a 32-bit word
constexpr u64 SENTINEL = ~0ull;                   // NaNs that no GPU computes
constexpr u64 ANY_NAN = DTYPE == FP32 ? 0x7fffffff7fffffffull : 0x7fff7fff7fff7fffull;

// ---------------------------------------------------------------------------------------------- elements

template <int W>
struct __align__(4 * W) Unit {
  u32 word[W];
};

template <int W>
INLINE Unit<W> read(const void* base, u32 index) {
  return static_cast<const Unit<W>*>(base)[index];
}

template <int W>
INLINE void write(void* base, u32 index, const Unit<W>& unit) {
  static_cast<Unit<W>*>(base)[index] = unit;
}

INLINE float widen(u32 word, u32 i) {
  if (DTYPE == FP32) return __uint_as_float(word);
  if (DTYPE == BF16) return __uint_as_float(i ? word & 0xffff0000u : word << 16);
  return from_fp16(i ? word >> 16 : word);
}

INLINE u32 narrow(const float* numbers) {
  if (DTYPE == FP32) return __float_as_uint(numbers[0]);
  return DTYPE == BF16 ? to_bf16(numbers[0], numbers[PER - 1]) : to_fp16(numbers[0], numbers[PER - 1]);
}

// A unit's elements in fp32. The sum starts with the first rank's numbers, not with zero, which would lose -0.
template <int W>
struct Sums {
  float number[W * PER];

  INLINE Sums of(const Unit<W>& unit) {
    Sums sums;
#pragma unroll
    for (u32 i = 0; i < W * PER; ++i) sums.number[i] = widen(unit.word[i / PER], i % PER);
    return sums;
  }

  __device__ __forceinline__ void add(const Unit<W>& unit) {
#pragma unroll
    for (u32 i = 0; i < W * PER; ++i) number[i] = __fadd_rn(number[i], widen(unit.word[i / PER], i % PER));
  }

  __device__ __forceinline__ Unit<W> rounded() const {
    Unit<W> unit;
#pragma unroll
    for (u32 i = 0; i < W; ++i) unit.word[i] = narrow(number + i * PER);
    return unit;
  }

  // The numbers themselves take PER units.
  __device__ __forceinline__ Unit<W> piece(u32 i) const {
    Unit<W> unit;
#pragma unroll
    for (u32 j = 0; j < W; ++j) unit.word[j] = __float_as_uint(number[i * W + j]);
    return unit;
  }

  __device__ __forceinline__ void set_piece(u32 i, const Unit<W>& unit) {
#pragma unroll
    for (u32 j = 0; j < W; ++j) number[i * W + j] = __uint_as_float(unit.word[j]);
  }
};

// ---------------------------------------------------------------------------------------------- a call

// argument_type in source.py has the same fields.
struct Rank {
  char* mail[RANKS];   // mailboxes, by rank, as this rank maps them
  const void* in;
  void* out;
  void* residual;      // of the norm only: [rows, hidden], updated in place
  const void* weight;  // of the norm only: [hidden]
  u32* report;         // memory of the host
  u64 patience;        // nanoseconds
  u32 rank;
  u32 grains;          // the message's size in units of 16 bytes
  u32 share;           // what a block works on: units of the kernel's words, or rows of the norm
  u32 hidden;
  float epsilon;
  u32 kernel;
  u32 fatal;  // whether giving up traps
};

struct Launch {
  Rank of[VIRTUAL];
};

// The control page at the start of a rank's own mailbox. Only its own kernels touch it.
struct Control {
  u32 epoch[MAX_BLOCKS];  // of the next call, once for each block that a launch can have
  u32 arrived;
  u32 given_up;
};

INLINE Control& control_of(const Rank& at) { return *reinterpret_cast<Control*>(at.mail[at.rank]); }

// The slot of an epoch in a rank's mailbox.
INLINE char* slot_of(const Rank& at, u32 rank, u32 epoch) {
  return at.mail[rank] + CONTROL_BYTES + static_cast<u64>(epoch % 2) * SLOT_BYTES;
}

constexpr u64 GIVEN_UP = ~0ull;

// `since` is the time of the first look, and the result the same again, or GIVEN_UP when that is too long ago. What the
// call gives then is wrong, so a server's kernel traps; only a probe's ends.
static __device__ __noinline__ u64 look_at_clock(const Rank& at, u32 epoch, u32 block, u32 peer, u64 since) {
  const u64 time = now();
  if (!since) return time;
  if (since == GIVEN_UP) return since;
  if (time - since < at.patience) return since;
  if (atomicExch(&control_of(at).given_up, 1)) {
    // The others leave the one that reports 100 ms, which a trap of theirs would cut short.
    for (u32 i = 0; at.fatal && i < 100; ++i) __nanosleep(1000000);
    if (at.fatal) __trap();
    return GIVEN_UP;
  }
  volatile u32* report = at.report;
  report[1] = epoch;
  report[2] = peer;
  report[3] = at.kernel;
  report[4] = block;
  __threadfence_system();
  report[0] = 1;
  __threadfence_system();
  if (at.fatal) __trap();
  return GIVEN_UP;
}

// Gives this epoch to all words of the slot that carry one, so that none keeps an old epoch until it comes round. All
// that the peers wrote in this call has been read, and they write here again only after this kernel.
static __device__ __noinline__ void refresh(const Rank& at, u32 epoch, u32 blocks) {
  __shared__ u32 last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&control_of(at).arrived, 1) == blocks - 1;
  }
  __syncthreads();
  if (!last) return;
  if (threadIdx.x == 0) control_of(at).arrived = 0;
  const u64 both = static_cast<u64>(epoch) << 32 | epoch;
  for (u32 i = threadIdx.x; i < (SENTINELS - PACKETS) / 16; i += blockDim.x)
    store_pair(slot_of(at, at.rank, epoch) + PACKETS + 16ull * i, both, both);
}

struct Call {
  const Rank& at;
  const u32 block;
  const u32 blocks;
  const u32 epoch;
  char* const mine;
  u64 since;
  u32 polls;

  __device__ __forceinline__ Call(const Rank& rank, u32 block, u32 blocks)
      : at(rank),
        block(block),
        blocks(blocks),
        epoch(load_counter(control_of(rank).epoch + block)),
        mine(slot_of(rank, rank.rank, epoch)),
        since(0),
        polls(0) {}

  __device__ __forceinline__ char* home(u32 peer) const { return slot_of(at, peer, epoch); }

  __device__ __forceinline__ u32 after(u32 i) const {
    const u32 peer = at.rank + i;
    return peer < RANKS ? peer : peer - RANKS;
  }

  // After a poll in vain: whether there may be another. Reading the clock each time would slow the polls down.
  __device__ __forceinline__ bool may_wait_for(u32 peer) {
    if (++polls % 512) return true;
    since = look_at_clock(at, epoch, block, peer, since);
    return since != GIVEN_UP;
  }

  // Counts the call: each block moves on the counters that no other block of this launch does, so that all of them
  // agree whatever the next launch's grid is.
  __device__ __forceinline__ void finish() {
    __syncthreads();
    for (u32 i = block + threadIdx.x * blocks; i < MAX_BLOCKS; i += blockDim.x * blocks)
      control_of(at).epoch[i] = epoch + 1;
    if ((epoch & 0x7fffffffu) < 2) refresh(at, epoch, blocks);
  }
};

// What a block works on: units from, to; in a two-shot up to `part` of them for each owner. The host divides, which
// takes a GPU longer than all else before the first store.
struct Range {
  u32 from, to, part;

  INLINE Range of(const Call& call, u32 units, u32 owners) {
    Range range;
    range.from = min(call.block * call.at.share, units);
    range.to = min(range.from + call.at.share, units);
    range.part = (call.at.share + owners - 1) / owners;
    return range;
  }

  __device__ __forceinline__ u32 owner(u32 unit) const { return (unit - from) / part; }
  __device__ __forceinline__ u32 begin(u32 owner) const { return min(from + owner * part, to); }
  __device__ __forceinline__ u32 end(u32 owner) const { return min(from + (owner + 1) * part, to); }
};

// ---------------------------------------------------------------------------------------------- words that prove arrival

// 4 bytes of data and 4 of epoch in each 8-byte word.
struct Packets {
  static constexpr int W = 2;
  static constexpr u32 WORDS = PACKETS, UNITS = PACKET_UNITS, PARTIALS = PACKET_PARTIALS;

  INLINE void put(const Call& call, char* to, const Unit<W>& unit) {
    const u64 epoch = static_cast<u64>(call.epoch) << 32;
    store_pair(to, epoch | unit.word[0], epoch | unit.word[1]);
  }
  INLINE bool arrived(const Call& call, u64 a, u64 b) { return a >> 32 == call.epoch && b >> 32 == call.epoch; }
  INLINE Unit<W> unit(u64 a, u64 b) { return {static_cast<u32>(a), static_cast<u32>(b)}; }
  INLINE void taken(char*) {}
};

// Plain data; a word has arrived once it is not the sentinel. A sum of two numbers or more turns every NaN into the
// GPU's own, so that another NaN in the sentinel's place changes no result.
struct Sentinels {
  static constexpr int W = 4;
  static constexpr u32 WORDS = SENTINELS, UNITS = SENTINEL_UNITS, PARTIALS = SENTINEL_PARTIALS;

  INLINE u64 word(u32 low, u32 high) {
    const u64 both = static_cast<u64>(high) << 32 | low;
    return both == SENTINEL ? ANY_NAN : both;
  }
  INLINE void put(const Call&, char* to, const Unit<W>& unit) {
    store_pair(to, word(unit.word[0], unit.word[1]), word(unit.word[2], unit.word[3]));
  }
  INLINE bool arrived(const Call&, u64 a, u64 b) { return a != SENTINEL && b != SENTINEL; }
  INLINE Unit<W> unit(u64 a, u64 b) {
    return {static_cast<u32>(a), static_cast<u32>(a >> 32), static_cast<u32>(b), static_cast<u32>(b >> 32)};
  }
  INLINE void taken(char* from) { store_pair(from, SENTINEL, SENTINEL); }
};

// ---------------------------------------------------------------------------------------------- ways to move data

// Words that prove arrival themselves, pushed into the receivers' mailboxes.
template <class Words>
struct Push {
  static constexpr int W = Words::W;
  using U = Unit<W>;

  INLINE char* place(char* home, u32 source, u32 unit) {
    return home + Words::WORDS + 16ull * (source * Words::UNITS + unit);
  }

  INLINE void send(const Call& call, u32 peer, u32 unit, const U& data) {
    Words::put(call, place(call.home(peer), call.at.rank, unit), data);
  }

  INLINE void send_to_owner(const Call& call, u32 owner, u32 unit, const U& data) { send(call, owner, unit, data); }

  INLINE void publish(const Call& call, u32 unit, const U& data) {
#pragma unroll
    for (u32 i = 1; i < RANKS; ++i) send(call, call.after(i), unit, data);
  }

  INLINE void settle(Call& call, u32) { PAUSE(call); }

  INLINE U await(Call& call, u32 peer, char* from) {
    u64 a, b;
    do load_pair(from, a, b);
    while (!Words::arrived(call, a, b) && call.may_wait_for(peer));
    Words::taken(from);
    return Words::unit(a, b);
  }

  INLINE U fetch(Call& call, u32 owner, u32 unit) { return await(call, owner, place(call.mine, owner, unit)); }

  // Adds what COUNT ranks from `first` on have at `unit`, in their order. All loads are under way before the first is
  // looked at.
  template <u32 COUNT, bool ONWARDS>
  INLINE void gather(Call& call, u32 first, u32 unit, const U& own, Sums<W>& sums) {
    u64 a[COUNT], b[COUNT];
    u32 missing = ((1u << COUNT) - 1) & ~(1u << (call.at.rank - first));
    do {
#pragma unroll
      for (u32 i = 0; i < COUNT; ++i)
        if (missing >> i & 1) load_pair(place(call.mine, first + i, unit), a[i], b[i]);
#pragma unroll
      for (u32 i = 0; i < COUNT; ++i)
        if ((missing >> i & 1) && Words::arrived(call, a[i], b[i])) missing &= ~(1u << i);
    } while (missing && call.may_wait_for(first + __ffs(missing) - 1));
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
      const bool self = first + i == call.at.rank;
      if (!self) Words::taken(place(call.mine, first + i, unit));
      const U data = self ? own : Words::unit(a[i], b[i]);
      if (i == 0 && !ONWARDS) sums = Sums<W>::of(data);
      else sums.add(data);
    }
  }
};

// A flag after the data: release makes all stores of the block visible before it.
INLINE void exchange_flags(Call& call, u32 phase) {
  PAUSE(call);
  __syncthreads();
  if (threadIdx.x < RANKS - 1) {
    const u32 peer = call.after(threadIdx.x + 1);
    const u64 flag = FLAGS + static_cast<u64>(FLAG_STRIDE) * (phase * RANKS * MAX_BLOCKS + call.block);
    constexpr u64 source = static_cast<u64>(FLAG_STRIDE) * MAX_BLOCKS;
    store_release(call.home(peer) + flag + source * call.at.rank, call.epoch);
    while (load_acquire(call.mine + flag + source * peer) != call.epoch && call.may_wait_for(peer)) {}
  }
  __syncthreads();
}

// Plain data and a flag. PULL: the data stay in the sender's own mailbox, and the others read them there.
template <bool PULL>
struct Flagged {
  static constexpr int W = 4;
  using U = Unit<W>;

  INLINE char* data(const Call& call, u32 home, u32 source) {
    return call.home(home) + DATA + 16ull * SENTINEL_UNITS * source;
  }

  INLINE void send(const Call& call, u32 peer, u32 unit, const U& unit_data) {
    write(data(call, peer, call.at.rank), unit, unit_data);
  }

  INLINE void send_to_owner(const Call& call, u32 owner, u32 unit, const U& unit_data) {
    send(call, PULL ? call.at.rank : owner, unit, unit_data);
  }

  INLINE void publish(const Call& call, u32 unit, const U& unit_data) {
#pragma unroll
    for (u32 i = PULL ? 0 : 1; i < (PULL ? 1 : RANKS); ++i) send(call, call.after(i), unit, unit_data);
  }

  INLINE void settle(Call& call, u32 phase) { exchange_flags(call, phase); }

  INLINE U fetch(Call& call, u32 owner, u32 unit) {
    return read<W>(data(call, PULL ? owner : call.at.rank, owner), unit);
  }

  template <u32 COUNT, bool ONWARDS>
  INLINE void gather(Call& call, u32, u32 unit, const U& own, Sums<W>& sums) {
    static_assert(COUNT == RANKS && !ONWARDS, "flags serve whole groups");
    U got[RANKS];
#pragma unroll
    for (u32 i = 0; i < RANKS; ++i)
      if (i != call.at.rank) got[i] = fetch(call, i, unit);
#pragma unroll
    for (u32 i = 0; i < RANKS; ++i) {
      const U unit_data = i == call.at.rank ? own : got[i];
      if (i == 0) sums = Sums<W>::of(unit_data);
      else sums.add(unit_data);
    }
  }
};

// ---------------------------------------------------------------------------------------------- algorithms

template <class Way>
INLINE void one_shot(Call& call) {
  constexpr int W = Way::W;
  const Range range = Range::of(call, call.at.grains * 4 / W, 1);
  for (u32 u = range.from + threadIdx.x; u < range.to; u += blockDim.x)
    Way::publish(call, u, read<W>(call.at.in, u));
  Way::settle(call, 0);
  for (u32 u = range.from + threadIdx.x; u < range.to; u += blockDim.x) {
    Sums<W> sums;
    Way::template gather<RANKS, false>(call, 0, u, read<W>(call.at.in, u), sums);
    write(call.at.out, u, sums.rounded());
  }
}

template <class Way>
INLINE void two_shot(Call& call) {
  constexpr int W = Way::W;
  const Range range = Range::of(call, call.at.grains * 4 / W, RANKS);
  const u32 rank = call.at.rank;
  for (u32 u = range.from + threadIdx.x; u < range.to; u += blockDim.x) {
    const u32 owner = range.owner(u);
    if (owner != rank) Way::send_to_owner(call, owner, u, read<W>(call.at.in, u));
  }
  Way::settle(call, 0);
  for (u32 u = range.begin(rank) + threadIdx.x; u < range.end(rank); u += blockDim.x) {
    Sums<W> sums;
    Way::template gather<RANKS, false>(call, 0, u, read<W>(call.at.in, u), sums);
    const Unit<W> sum = sums.rounded();
    Way::publish(call, u, sum);
    write(call.at.out, u, sum);
  }
  Way::settle(call, 1);
  for (u32 u = range.from + threadIdx.x; u < range.to; u += blockDim.x) {
    const u32 owner = range.owner(u);
    if (owner != rank) write(call.at.out, u, Way::fetch(call, owner, u));
  }
}

#if RANKS >= 4

constexpr u32 HALF = RANKS / 2;

// Two halves in a chain. Parts are summed inside the first half, the sums go to the second half in fp32, which adds its
// own numbers one by one and sends the result back; so the order of additions is that of one-shot. Each part crosses
// between the halves once each way.
template <class Words>
INLINE void island(Call& call) {
  using Way = Push<Words>;
  constexpr int W = Way::W;
  const Range range = Range::of(call, call.at.grains * 4 / W, HALF);
  const u32 rank = call.at.rank;
  const bool leads = rank < HALF;
  const u32 first = leads ? 0 : HALF;
  const u32 part = rank - first;
  const u32 partner = leads ? rank + HALF : rank - HALF;
  const u32 begin = range.begin(part), end = range.end(part);

  for (u32 u = range.from + threadIdx.x; u < range.to; u += blockDim.x) {
    const u32 owner = range.owner(u);
    if (owner != part) Way::send(call, first + owner, u, read<W>(call.at.in, u));
  }
  Way::settle(call, 0);
  if (leads) {
    for (u32 u = begin + threadIdx.x; u < end; u += blockDim.x) {
      Sums<W> sums;
      Way::template gather<HALF, false>(call, first, u, read<W>(call.at.in, u), sums);
#pragma unroll
      for (u32 i = 0; i < PER; ++i)
        Words::put(call, call.home(partner) + Words::PARTIALS + 16ull * (u * PER + i), sums.piece(i));
    }
  }
  for (u32 u = begin + threadIdx.x; u < end; u += blockDim.x) {
    Unit<W> sum;
    if (leads) {
      sum = Way::fetch(call, partner, u);
    } else {
      Sums<W> sums;
#pragma unroll
      for (u32 i = 0; i < PER; ++i)
        sums.set_piece(i, Way::await(call, partner, call.mine + Words::PARTIALS + 16ull * (u * PER + i)));
      Way::template gather<HALF, true>(call, first, u, read<W>(call.at.in, u), sums);
      sum = sums.rounded();
      Way::send(call, partner, u, sum);
    }
#pragma unroll
    for (u32 i = 1; i < HALF; ++i) Way::send(call, first + (part + i) % HALF, u, sum);
    write(call.at.out, u, sum);
  }
  for (u32 u = range.from + threadIdx.x; u < range.to; u += blockDim.x) {
    const u32 owner = range.owner(u);
    if (owner != part) write(call.at.out, u, Way::fetch(call, first + owner, u));
  }
}

#endif

INLINE float sum_of_block(float number) {
  __shared__ float warps[MAX_THREADS / 32];
  number = sum_of_warp(number);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = number;
  __syncthreads();
  float total = 0;
  for (u32 i = 0; i < blockDim.x / 32; ++i) total += warps[i];
  __syncthreads();
  return total;
}

// One-shot, and behind it the residual's addition and RMSNorm. The sum is rounded first, as if another kernel took it
// from memory. A block has whole rows; `row` holds one of them in fp32.
template <class Way>
INLINE void one_shot_norm(Call& call) {
  constexpr int W = Way::W;
  constexpr u32 E = W * PER;
  float* const row = shared_memory();
  const u32 width = call.at.hidden / E;
  const Range rows = Range::of(call, call.at.grains * 4 / W / width, 1);
  for (u32 u = rows.from * width + threadIdx.x; u < rows.to * width; u += blockDim.x)
    Way::publish(call, u, read<W>(call.at.in, u));
  Way::settle(call, 0);
  for (u32 r = rows.from; r < rows.to; ++r) {
    float squares = 0;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
      const u32 u = r * width + i;
      Sums<W> sums;
      Way::template gather<RANKS, false>(call, 0, u, read<W>(call.at.in, u), sums);
      sums = Sums<W>::of(sums.rounded());
      sums.add(read<W>(call.at.residual, u));
      write(call.at.residual, u, sums.rounded());
#pragma unroll
      for (u32 e = 0; e < E; ++e) {
        row[i * E + e] = sums.number[e];
        squares += sums.number[e] * sums.number[e];
      }
    }
    const float scale = rsqrtf(sum_of_block(squares) / call.at.hidden + call.at.epsilon);
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
      Sums<W> weight = Sums<W>::of(read<W>(call.at.weight, i));
#pragma unroll
      for (u32 e = 0; e < E; ++e) weight.number[e] *= row[i * E + e] * scale;
      write(call.at.out, r * width + i, weight.rounded());
    }
  }
}

// ---------------------------------------------------------------------------------------------- entry points

#define KERNEL(name, body)                                                                                   \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS) name(const __grid_constant__ Launch launch) {    \
    const u32 blocks = gridDim.x / VIRTUAL, place = VIRTUAL == 1 ? 0 : blockIdx.x / blocks;                  \
    Call call(launch.of[place], blockIdx.x - place * blocks, blocks);                                        \
    body(call);                                                                                              \
    call.finish();                                                                                           \
  }

KERNEL(packet, one_shot<Push<Packets>>)
KERNEL(sentinel, one_shot<Push<Sentinels>>)
KERNEL(flag, one_shot<Flagged<false>>)
KERNEL(pull, one_shot<Flagged<true>>)
KERNEL(two_packet, two_shot<Push<Packets>>)
KERNEL(two_sentinel, two_shot<Push<Sentinels>>)
KERNEL(two_flag, two_shot<Flagged<false>>)
KERNEL(two_pull, two_shot<Flagged<true>>)
#if RANKS >= 4
KERNEL(island_packet, island<Packets>)
KERNEL(island_sentinel, island<Sentinels>)
#endif
KERNEL(packet_norm, one_shot_norm<Push<Packets>>)
KERNEL(sentinel_norm, one_shot_norm<Push<Sentinels>>)
KERNEL(flag_norm, one_shot_norm<Flagged<false>>)
KERNEL(pull_norm, one_shot_norm<Flagged<true>>)

// Plain traffic with all peers, to measure links: each rank's share of the first slot's plain data.
template <bool PULL>
INLINE void copy(const Rank& at, u32 block, u32 blocks) {
  const u64 share = 16ull * SENTINEL_UNITS;
  for (u32 u = block * blockDim.x + threadIdx.x; u < at.grains; u += blocks * blockDim.x) {
#pragma unroll
    for (u32 i = 1; i < RANKS; ++i) {
      const u32 peer = (at.rank + i) % RANKS;
      if (PULL) {
        u64 a, b;
        load_pair(slot_of(at, peer, 0) + DATA + share * peer + 16ull * u, a, b);
      } else {
        store_pair(slot_of(at, peer, 0) + DATA + share * at.rank + 16ull * u, u, at.rank);
      }
    }
  }
}

#define COPY(name, pull)                                                                                     \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS) name(const __grid_constant__ Launch launch) {    \
    const u32 blocks = gridDim.x / VIRTUAL;                                                                  \
    copy<pull>(launch.of[VIRTUAL == 1 ? 0 : blockIdx.x / blocks], blockIdx.x % blocks, blocks);              \
  }

COPY(copy_push, false)
COPY(copy_pull, true)
