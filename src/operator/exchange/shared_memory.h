// Where the processes of one machine meet: memory that they share.
//
// Each process has a segment: a file without a name that the others map, so nothing stays behind
// whoever dies. Of the processes that exchange a key, the first makes the key's slots in its
// segment and lists them there. In each exchange a process writes its slot and is counted, and
// reads the slots of all when all are counted. So nobody reads what a process that died has left
// half written.
#ifndef GLUON_SYNCBN_EXCHANGE_SHARED_MEMORY_H_
#define GLUON_SYNCBN_EXCHANGE_SHARED_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "exchange/channel.h"
#include "mxnet/watch.h"

namespace gluon_syncbn {

// The slots of one key: for each rank one of even and one of odd calls. A process that writes a
// slot again knows that all have been counted in the call between, and so have read it.
struct Slots {
  struct Counts {
    // How often processes have been counted, modulo 2^32; the futex on which they sleep.
    std::atomic<uint32_t> arrived;
    std::atomic<uint32_t> sleepers;
  };

  Counts* counts = nullptr;
  int64_t ranks = 0, size = 0;

  // How many values each rank brings.
  std::atomic<int64_t>* sizes() const;
  double* slot(int64_t rank, uint32_t call) const;
  // The bytes of all this.
  int64_t bytes() const;
};

class Segment {
 public:
  // One of this process, which others open by its descriptor. The token, of kTokenSize bytes, shows
  // them that it is the right one. Throws std::runtime_error, as open() does.
  static std::shared_ptr<Segment> create(const std::string& token);
  // One of another process, whose descriptor is this file: "/proc/12/fd/3".
  static std::shared_ptr<Segment> open(const std::string& file, const std::string& token);
  ~Segment();

  static constexpr size_t kTokenSize = 16;

  int descriptor() const { return descriptor_; }
  // From now on nobody can open it.
  void close_descriptor();

  // Lists the slots of a new key. Throws std::runtime_error.
  Slots add(const std::string& key, int64_t ranks, int64_t size);
  // Without counts if the key is not listed yet. Throws std::runtime_error.
  Slots find(const std::string& key, int64_t ranks) const;
  // How many are listed, the futex on which those sleep who wait for one more.
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
  // segment: that of rank 0. sums: the values are a layer's messages, which are added up if they
  // are of one call. Throws std::runtime_error.
  SharedMemoryTransport(std::shared_ptr<Segment> segment, std::string key, int64_t rank,
                        int64_t ranks, int64_t size, bool sums);

  void pack(const double* mine) override { mine_ = mine; }
  void send(std::mutex* store) override;
  Waited wait(double seconds) override;
  Answer unpack(double* values) override;

 private:
  // Once the key is listed, writes the values and is counted. False before.
  bool arrive();
  bool all_have_arrived() const;
  // Sleeps for so many seconds at most. True if all have arrived.
  bool sleep(double seconds);

  const std::shared_ptr<Segment> segment_;
  const std::string key_;
  const int64_t rank_, ranks_, size_;
  const bool sums_;
  Slots slots_;
  // Of the exchange in progress.
  const double* mine_ = nullptr;
  uint32_t call_ = 0;
  bool arrived_ = false;
  Interruption interruption_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_EXCHANGE_SHARED_MEMORY_H_
