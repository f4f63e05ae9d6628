// The soak of proof.cu on the host: CALLS BLOCKS THREADS FIRST_EPOCH SECONDS. It prints how many words were wrong and
// how many ranks ended; or "unequal epochs" where the counters disagree, "old epochs" where a word kept one from before
// the run though the epoch came to 0 or 2^31. It stands behind proof.cu.

static Soak job;

static void run_soak() { soak(job); }

// The oldest epoch in a slot, counted back from `epoch`.
static u32 age(const char* slot, u32 epoch) {
  u32 oldest = 0;
  const auto look = [&](u64 at) { oldest = max(oldest, epoch - *reinterpret_cast<const u32*>(slot + at)); };
  for (u64 at = PACKETS; at < FLAGS; at += 8) look(at + 4);
  for (u64 at = FLAGS; at < SENTINELS; at += FLAG_STRIDE) look(at);
  return oldest;
}

template <class T>
static T* buffer(u64 bytes, int content) {
  void* found = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  memset(found, content, bytes);
  return static_cast<T*>(found);
}

int main(int, char** words) {
  const u32 calls = strtoul(words[1], nullptr, 0), blocks = strtoul(words[2], nullptr, 0);
  const u32 threads = strtoul(words[3], nullptr, 0), first_epoch = strtoul(words[4], nullptr, 0);
  const u32 grains = 1024;
  char* mail[RANKS];
  Faults faults = {};
  u32 arrived[RANKS] = {}, report[8] = {};
  for (char*& box : mail) {
    box = buffer<char>(CONTROL_BYTES + 2ull * SLOT_BYTES, 0);
    for (u32 i = 0; i < MAX_BLOCKS; ++i) reinterpret_cast<u32*>(box)[i] = first_epoch;
    for (u32 slot = 0; slot < 2; ++slot) {
      char* const base = box + CONTROL_BYTES + static_cast<u64>(slot) * SLOT_BYTES;
      for (u64 at = PACKETS; at < SENTINELS; at += 4) *reinterpret_cast<u32*>(base + at) = first_epoch - 1;
      memset(base + SENTINELS, 0xff, DATA - SENTINELS);
    }
  }
  for (u32 r = 0; r < RANKS; ++r) {
    Rank& rank = job.launch.of[r];
    memcpy(rank.mail, mail, sizeof mail);
    rank.in = buffer<char>(16 * grains + 32, 0) + 16;
    rank.out = buffer<char>(16 * grains + 32, 0) + 16;
    rank.report = report;
    rank.patience = 1000000000ull * strtoul(words[5], nullptr, 0);
    rank.rank = r;
    rank.fatal = 1;
  }
  job.arrived = arrived;
  job.faults = &faults;
  job.calls = calls;
  job.most_grains = grains;
  job.kinds = (1u << (RANKS >= 4 ? 10 : 8)) - 1;
  job.delay = 300000;
  run_grid(blocks * RANKS, threads, run_soak);
  const u32 epoch = first_epoch + calls;
  const bool came_round = (first_epoch & 0x7fffffffu) > (epoch & 0x7fffffffu);
  for (char* box : mail) {
    for (u32 i = 0; i < MAX_BLOCKS; ++i)
      if (reinterpret_cast<u32*>(box)[i] != epoch) return printf("unequal epochs\n"), 1;
    for (u32 slot = 0; came_round && slot < 2; ++slot)
      if (age(box + CONTROL_BYTES + static_cast<u64>(slot) * SLOT_BYTES, epoch) > calls)
        return printf("old epochs\n"), 1;
  }
  printf("%u wrong words, %u ranks ended\n", faults.count, faults.done);
  return faults.count != 0;
}
