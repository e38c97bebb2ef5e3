// A process that waits stays awake for a moment, then sleeps on a futex: the count of the key's
// arrivals or, until rank 0 has listed the key, that of the keys. What others have written is
// checked before it is used as an offset.
#include "processes/shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <stdexcept>

#include "processes/text.h"

namespace gluon_syncbn {
namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free &&
                  std::atomic<int64_t>::is_always_lock_free,
              "processes share them");

// The size of a segment, which takes memory only where it has been written. The layers of a
// ResNet-152 write 15 MB for each process of the machine.
constexpr int64_t kBytes = int64_t{4} << 30;
constexpr int64_t kMostKeys = 1 << 14, kLongestKey = 112;
constexpr int64_t kCacheLine = 64;
// How long a waiting process stays awake.
constexpr std::chrono::microseconds kAwake{50};

int64_t whole_lines(int64_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

int64_t bytes_of_slot(int64_t size) { return whole_lines(size * int64_t{sizeof(double)}); }

int64_t bytes_before_slots(int64_t ranks) {
  return kCacheLine + whole_lines(ranks * int64_t{sizeof(int64_t)});
}

char* bytes_of(void* object) { return static_cast<char*>(object); }

// Sleeps if *word is `value`, until it is woken, for at most `seconds`.
void sleep_on(std::atomic<uint32_t>* word, uint32_t value, double seconds) {
  const auto whole = static_cast<time_t>(seconds);
  const timespec limit{whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::runtime_error system_error(const std::string& what) {
  return std::runtime_error(what + ": " + std::strerror(errno));
}

}  // namespace

std::atomic<int64_t>* Slots::sizes() const {
  return reinterpret_cast<std::atomic<int64_t>*>(bytes_of(counts) + kCacheLine);
}

double* Slots::slot(int64_t rank, uint32_t call) const {
  const int64_t number = ranks * (call % 2) + rank;
  return reinterpret_cast<double*>(bytes_of(counts) + bytes_before_slots(ranks) +
                                   bytes_of_slot(size) * number);
}

int64_t Slots::bytes() const { return bytes_before_slots(ranks) + 2 * ranks * bytes_of_slot(size); }

struct Segment::Key {
  char name[kLongestKey];
  int64_t offset, size, bytes;
};

struct Segment::Header {
  char token[kTokenSize];
  std::atomic<uint32_t> keys;
  Key list[kMostKeys];
};

namespace {

Slots::Counts* counts_at(void* segment, int64_t offset) {
  return reinterpret_cast<Slots::Counts*>(bytes_of(segment) + offset);
}

}  // namespace

std::shared_ptr<Segment> Segment::create(const std::string& token) {
  const int descriptor = memfd_create("gluon_syncbn", MFD_CLOEXEC);
  if (descriptor < 0) throw system_error("memfd_create");
  if (ftruncate(descriptor, kBytes) != 0) {
    const auto error = system_error("ftruncate");
    close(descriptor);
    throw error;
  }
  return std::shared_ptr<Segment>(new Segment(descriptor, token.data(), true));
}

std::shared_ptr<Segment> Segment::open(const std::string& file, const std::string& token) {
  const int descriptor = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) throw system_error(file);
  std::shared_ptr<Segment> segment(new Segment(descriptor, token.data(), false));
  segment->close_descriptor();
  return segment;
}

Segment::Segment(int descriptor, const char* token, bool is_new) : descriptor_(descriptor) {
  void* memory = MAP_FAILED;
  std::runtime_error error("the file has another size");
  if (lseek(descriptor, 0, SEEK_END) == kBytes) {
    memory =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    error = system_error("mmap");
  }
  if (memory == MAP_FAILED) {
    close_descriptor();
    throw error;
  }
  // A core dump would write, and so allocate, all of it.
  madvise(memory, kBytes, MADV_DONTDUMP);
  header_ = static_cast<Header*>(memory);
  if (is_new) {
    std::memcpy(header_->token, token, kTokenSize);
  } else if (std::memcmp(header_->token, token, kTokenSize) != 0) {
    munmap(memory, kBytes);
    close_descriptor();
    throw std::runtime_error("the memory is another process's");
  }
}

Segment::~Segment() {
  munmap(header_, kBytes);
  close_descriptor();
}

void Segment::close_descriptor() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

std::atomic<uint32_t>* Segment::keys() const { return &header_->keys; }

Slots Segment::add(const std::string& key, int64_t ranks, int64_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint32_t number = header_->keys.load();
  const int64_t offset = number ? header_->list[number - 1].offset + header_->list[number - 1].bytes
                                : whole_lines(sizeof(Header));
  const int64_t bytes = Slots{nullptr, ranks, size}.bytes();
  if (static_cast<int64_t>(key.size()) >= kLongestKey) {
    throw std::runtime_error("The key " + key + " is too long.");
  }
  if (number == kMostKeys || bytes > kBytes - offset) {
    throw std::runtime_error(
        "The memory that processes share is full, after " + std::to_string(number) +
        " keys: do not make new layers in every step, or set GLUON_SYNCBN_SHARED_MEMORY=0.");
  }
  Key* const next = &header_->list[number];
  *next = {{}, offset, size, bytes};
  std::memcpy(next->name, key.data(), key.size());
  header_->keys.store(number + 1);
  wake_all(&header_->keys);
  return {counts_at(header_, offset), ranks, size};
}

Slots Segment::find(const std::string& key, int64_t ranks) const {
  const uint32_t number = std::min<uint32_t>(header_->keys.load(), kMostKeys);
  for (uint32_t i = 0; i < number; ++i) {
    // A copy, as other processes may change what is there.
    const Key found = header_->list[i];
    if (key != std::string(found.name, strnlen(found.name, kLongestKey))) continue;
    const Slots slots{counts_at(header_, found.offset), ranks, found.size};
    const bool is_within = found.offset > 0 && found.offset % kCacheLine == 0 &&
                           found.offset < kBytes && found.size >= 0 && found.size < kBytes / 16 &&
                           slots.bytes() == found.bytes && found.bytes <= kBytes - found.offset;
    if (!is_within) throw std::runtime_error("The memory that processes share was damaged.");
    return slots;
  }
  return {};
}

SharedMemoryTransport::SharedMemoryTransport(std::shared_ptr<Segment> segment, std::string key,
                                             int64_t rank, int64_t ranks, int64_t size, bool sums)
    : segment_(std::move(segment)),
      key_(std::move(key)),
      rank_(rank),
      ranks_(ranks),
      size_(size),
      sums_(sums) {
  if (rank == 0) slots_ = segment_->add(key_, ranks, size);
}

void SharedMemoryTransport::send(std::mutex*) {
  ++call_;
  arrived_ = false;
  interruption_ = Interruption();
  arrive();
}

bool SharedMemoryTransport::arrive() {
  if (arrived_) return true;
  if (!slots_.counts) slots_ = segment_->find(key_, ranks_);
  if (!slots_.counts) return false;
  slots_.sizes()[rank_] = size_;
  if (slots_.size == size_) {
    std::copy_n(mine_, size_, slots_.slot(rank_, call_));
  }
  arrived_ = true;
  slots_.counts->arrived.fetch_add(1);
  if (all_have_arrived() && slots_.counts->sleepers.load()) wake_all(&slots_.counts->arrived);
  return true;
}

bool SharedMemoryTransport::all_have_arrived() const {
  const uint32_t wanted = call_ * static_cast<uint32_t>(ranks_);
  return static_cast<int32_t>(slots_.counts->arrived.load() - wanted) >= 0;
}

bool SharedMemoryTransport::sleep(double seconds) {
  const uint32_t keys = segment_->keys()->load();
  if (!arrive()) {
    sleep_on(segment_->keys(), keys, seconds);
    return arrive() && all_have_arrived();
  }
  slots_.counts->sleepers.fetch_add(1);
  const uint32_t arrived = slots_.counts->arrived.load();
  if (!all_have_arrived()) sleep_on(&slots_.counts->arrived, arrived, seconds);
  slots_.counts->sleepers.fetch_sub(1);
  return all_have_arrived();
}

Waited SharedMemoryTransport::wait(double seconds) {
  if (arrived_ && spin_until([&] { return all_have_arrived(); }, kAwake)) return Waited::kDone;
  return wait_in_slices(seconds, interruption_, [&](double slice) { return sleep(slice); });
}

Answer SharedMemoryTransport::unpack(std::vector<double>* values) {
  const std::atomic<int64_t>* const sizes = slots_.sizes();
  if (std::any_of(sizes, sizes + ranks_, [&](int64_t size) { return size != size_; })) {
    throw std::runtime_error(different_sizes(key_, {sizes, sizes + ranks_}));
  }
  const auto slot = [&](int64_t rank) -> const double* { return slots_.slot(rank, call_); };
  bool are_of_one_call = sums_;
  for (int64_t rank = 1; rank < ranks_ && are_of_one_call; ++rank) {
    are_of_one_call = slot(rank)[0] == slot(0)[0];
  }
  if (!are_of_one_call) {
    values->clear();
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      values->insert(values->end(), slot(rank), slot(rank) + size_);
    }
    return Answer::kValues;
  }
  if (rank_ > 0) std::copy_n(slot(0), size_, values->data());
  for (int64_t rank = 1; rank < ranks_; ++rank) add_message(slot(rank), size_, values->data());
  return Answer::kSums;
}

}  // namespace gluon_syncbn
