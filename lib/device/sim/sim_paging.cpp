// The words of the paging protocol on simulated devices. Groups are threads, so the words are
// memory of the process, and a store behind copies is work on a stream.
#include <errno.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "device/paging_words.h"
#include "device/sim/sim_stream.h"

namespace vmem::device {

namespace {

struct WordsOfRange {
  std::vector<uint64_t> words;
  std::vector<uint32_t> use;
  paging::Control<paging::HostAtomics> control;
  std::atomic<uint64_t> reached{0};
  std::shared_ptr<WordsOfRange> self;  // words that are kept for ever, in a list
  WordsOfRange* next = nullptr;
};

constexpr uint32_t kCells = 256;

}  // namespace

class SimPagingWords final : public PagingWords {
 public:
  SimPagingWords(SimDevices& sim, int device, uint32_t blocks, uint32_t frames)
      : PagingWords(sim, device), sim_(sim), memory_(std::make_shared<WordsOfRange>()) {
    memory_->words.resize(4 * size_t{blocks} + kCells);
    memory_->use.resize(blocks);
    written_.resize(blocks);
    uint64_t* const first = memory_->words.data();
    table_ = {first,
              first + blocks,
              first + 2 * size_t{blocks},
              memory_->use.data(),
              &memory_->control,
              first + 4 * size_t{blocks},
              kCells,
              blocks,
              frames,
              first + 3 * size_t{blocks}};
    paging::initialise(table_);
  }
  ~SimPagingWords() override {
    for (void* stream : {arrivals_, departures_})
      if (stream != nullptr) sim_.destroy_stream(stream);
  }
  void start(int device) {
    arrivals_ = sim_.create_stream(device);
    departures_ = sim_.create_stream(device);
  }
  void* arrivals() const override { return arrivals_; }
  void* departures() const override { return departures_; }
  Status set_state(uint32_t block, uint64_t word, bool arrives) override {
    using paging::HostAtomics;
    if (!arrives) {
      HostAtomics::store_release(&table_.state[block], word);
      return {};
    }
    return put([memory = memory_, at = &table_.state[block], word] { HostAtomics::store_release(at, word); });
  }
  bool reads_host() const override { return true; }
  Status set_home(uint32_t block, uint64_t address) override {
    paging::HostAtomics::store(&table_.home[block], address);
    return {};
  }
  Status mark(uint64_t number) override {
    return put([memory = memory_, number] { memory->reached.store(number, std::memory_order_release); });
  }
  uint64_t reached() const override { return memory_->reached.load(std::memory_order_acquire); }
  Status settle() override {
    if (lost()) return error(EIO, "the device is lost: its words cannot be read");
    paging::HostAtomics::fence();
    for (uint32_t b = 0; b < table_.blocks; ++b) written_[b] = paging::HostAtomics::load(&table_.written[b]);
    return {};
  }
  uint32_t use(uint32_t block) const override { return paging::HostAtomics::load_acquire(&table_.use[block]); }
  uint64_t written(uint32_t block) const override { return written_[block]; }
  Status progress(uint64_t number) override {
    paging::HostAtomics::store(&table_.control->progress, number);
    return {};
  }
  Status taken(uint64_t cells) override {
    paging::HostAtomics::store(&table_.control->ring_taken, cells);
    return {};
  }
  Status end(paging::Answer why) override {
    paging::HostAtomics::store_release(&table_.control->ended, static_cast<uint32_t>(why));
    return {};
  }
  void abandon() override {
    static std::mutex mutex;
    static WordsOfRange* kept = nullptr;
    const std::lock_guard lock(mutex);
    if (memory_->self != nullptr) return;
    memory_->self = memory_;
    memory_->next = std::exchange(kept, memory_.get());
  }

 private:
  template <typename Work>
  Status put(Work work) {
    return sim_.enqueue(static_cast<SimDevices::Stream*>(arrivals_), std::move(work));
  }

  SimDevices& sim_;
  const std::shared_ptr<WordsOfRange> memory_;  // work on the stream keeps it
  std::vector<uint64_t> written_;               // as at the last settle()
  void* arrivals_ = nullptr;
  void* departures_ = nullptr;
};

Status SimDevices::make_paging_words(int device, uint32_t blocks, uint32_t frames,
                                     std::unique_ptr<PagingWords>* out) try {
  if (Status s = usable(device); !s.ok()) return s;
  if (unified()) return Devices::make_paging_words(device, blocks, frames, out);
  auto words = std::make_unique<SimPagingWords>(*this, device, blocks, frames);
  words->start(device);
  *out = std::move(words);
  return {};
} catch (const std::bad_alloc&) {
  return error(ENOMEM, "no memory for the words of %u blocks", blocks);
}

}  // namespace vmem::device
