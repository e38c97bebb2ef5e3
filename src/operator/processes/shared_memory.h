// The transport between the processes of one machine: shared memory.
//
// Each process has a segment, a file without a name that the others map, so nothing is left behind
// when processes die. Rank 0 of a route's processes makes the slots of its key in its segment and
// lists them there. In each exchange, each process writes its slot, is counted as arrived, and
// reads the slots of all once all have arrived. So no process reads a slot that a dying process
// left half written.
#ifndef GLUON_SYNCBN_PROCESSES_SHARED_MEMORY_H_
#define GLUON_SYNCBN_PROCESSES_SHARED_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "mxnet/array_wait.h"
#include "processes/route.h"

namespace gluon_syncbn {

// The slots of one key: for each rank one for even and one for odd calls. When a process writes a
// slot again, all have arrived at the call in between, and so have read the slot.
struct Slots {
  struct Counts {
    // The number of arrivals, modulo 2^32. It is the futex on which processes sleep.
    std::atomic<uint32_t> arrived;
    std::atomic<uint32_t> sleepers;
  };

  Counts* counts = nullptr;
  int64_t ranks = 0, size = 0;

  // How many values each rank sends.
  std::atomic<int64_t>* sizes() const;
  double* slot(int64_t rank, uint32_t call) const;
  // The size of all this in bytes.
  int64_t bytes() const;
};

class Segment {
 public:
  // Makes a segment of this process, which others open by its descriptor. The token, of kTokenSize
  // bytes, shows them that it is the right one. Throws std::runtime_error, as open() does.
  static std::shared_ptr<Segment> create(const std::string& token);
  // Opens a segment of another process by the file of its descriptor, such as "/proc/12/fd/3".
  static std::shared_ptr<Segment> open(const std::string& file, const std::string& token);
  ~Segment();

  static constexpr size_t kTokenSize = 16;

  int descriptor() const { return descriptor_; }
  // From now on nobody can open it.
  void close_descriptor();

  // Lists the slots of a new key. Throws std::runtime_error.
  Slots add(const std::string& key, int64_t ranks, int64_t size);
  // Returns null counts if the key is not listed yet. Throws std::runtime_error.
  Slots find(const std::string& key, int64_t ranks) const;
  // The number of listed keys. It is the futex on which processes sleep that wait for another key.
  std::atomic<uint32_t>* keys() const;

 private:
  struct Header;
  struct Key;

  Segment(int descriptor, const char* token, bool is_new);

  int descriptor_;
  Header* header_;
  std::mutex mutex_;
};

class SharedMemoryTransport : public Transport {
 public:
  // segment: that of rank 0. sums: whether the values are a layer's messages, which are added up if
  // all are of the same call. Throws std::runtime_error.
  SharedMemoryTransport(std::shared_ptr<Segment> segment, std::string key, int64_t rank,
                        int64_t ranks, int64_t size, bool sums);

  void pack(const double* mine) override { mine_ = mine; }
  void send(std::mutex* store) override;
  Waited wait(double seconds) override;
  Answer unpack(std::vector<double>* values) override;

 private:
  // If the key is listed, writes the values and counts this process as arrived. Otherwise returns
  // false.
  bool arrive();
  bool all_have_arrived() const;
  // Sleeps for at most `seconds`. Returns whether all have arrived.
  bool sleep(double seconds);

  const std::shared_ptr<Segment> segment_;
  const std::string key_;
  const int64_t rank_, ranks_, size_;
  const bool sums_;
  Slots slots_;
  // State of the exchange in progress.
  const double* mine_ = nullptr;
  uint32_t call_ = 0;
  bool arrived_ = false;
  Interruption interruption_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_PROCESSES_SHARED_MEMORY_H_
