// The common part of all backends of Devices: reservations, the state of each unit, every refusal,
// the CPU's side of a move (map, mprotect, CpuGate) and remembered advice. A backend adds
// the calls that need a device.
//
// Locks: registry_mutex_ (shared: lookups), advice_mutex_, pin_mutex_. They are leaves; none is
// held during a call of a backend.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "core/inplace_vector.h"
#include "device/device.h"

namespace vmem::device {

enum class UnitState : uint8_t {
  hole,     // no access, does not park: a trap stands there (all zero: the state of a new reservation)
  punched,  // no access, parks
  fresh,    // split: made, not mapped, and holds old bytes of another unit
  shut,     // made, no access, parks (split: made, not mapped)
  held,     // made, CPU may read, stores park
  read,     // made, CPU may read, stores go to the hook
  open,     // made, CPU may read and write (split: mapped)
};
constexpr bool is_made(UnitState s) {
  return s >= UnitState::fresh;
}
// Sets of states.
constexpr unsigned bit(UnitState s) {
  return 1u << static_cast<unsigned>(s);
}
inline constexpr unsigned kHoles = bit(UnitState::hole) | bit(UnitState::punched);
inline constexpr unsigned kMade =
    bit(UnitState::fresh) | bit(UnitState::shut) | bit(UnitState::held) | bit(UnitState::read) | bit(UnitState::open);
inline constexpr unsigned kAny = kHoles | kMade;
const char* unit_state_name(UnitState state);

struct Unit {
  std::atomic<UnitState> state;
  std::atomic<uint8_t> device;  // made: the device it is on
  std::atomic<uint8_t> advice;  // index into the advice table; 0: none
  std::atomic<uint8_t> moving;  // sim: copies in flight
  std::atomic<uint32_t> piece;  // split, made: in its device's pool
  std::atomic<uint8_t> filled;  // split: by parts, up to so many times kUnit; 0: no part was issued, or all were
};

struct Reservation {
  ~Reservation();
  uintptr_t base = 0;
  size_t size = 0;        // bytes
  size_t unit = kUnit;    // bytes
  Unit* units = nullptr;  // size / unit, lazily allocated zero pages
  // Of the backend: what the driver gave (may start before base), or the sim's second view of the
  // bytes.
  void* backend = nullptr;
  size_t backend_size = 0;
  uint64_t backend_offset = 0;
  int device = 0;
  std::atomic<size_t> made{0};  // units

  size_t index(uintptr_t address) const { return (address - base) / unit; }
};
using ReservationPtr = std::shared_ptr<Reservation>;

class UnitDevices : public Devices {
 public:
  CpuGate* cpu_gate() const final { return gate_; }
  size_t unit() const final { return unit_; }
  size_t largest_unit() const final { return unified() ? kUnit : kLargestUnit; }
  int count() const final { return static_cast<int>(infos_.size()); }
  const Info& info(int device) const final { return infos_[static_cast<size_t>(device)]; }
  core::Status memory(int device, Memory* out) final;
  using Devices::reserve;
  core::Status reserve(size_t size, size_t unit, int device, void** base) final;
  core::Status release(void* base) final;
  core::Status populate(std::span<const Range> ranges, int device, bool* torn) final;
  core::Status copy_in(int device, std::span<const Copy> copies, Ticket* done) final;
  core::Status copy_out(int device, std::span<const Copy> copies, Ticket* done) final;
  core::Status map(std::span<const Range> ranges) final { return map_units(ranges, true); }
  core::Status map_ahead(std::span<const Range> ranges) final { return map_units(ranges, false); }
  core::Status unmap(std::span<const Range> ranges) final;
  core::Status share(Range range, Export how, int* descriptor) final;
  core::Status open(std::span<const Range> ranges, Access access) final;
  core::Status write_protect(std::span<const Range> ranges, Access still_allowed) final;
  core::Status punch(std::span<const Range> ranges) final;
  core::Status rearm(std::span<const Range> ranges) final;
  using Devices::migrate;
  core::Status migrate(std::span<const Range> ranges, int to, int by, std::span<core::Status> each) final;
  void migrate_all(Migration& all, int to, int by) final;
  core::Status advise(Range range, Advice advice, int location, bool set) final;
  core::Status host_resident_bytes(Range range, uint64_t* bytes) final;
  core::Status pin(void* frames, size_t size) final;
  core::Status unpin(void* frames) final;

 protected:
  // gate: of unified memory; null: split.
  UnitDevices(CpuGate* gate, size_t unit) : unit_(unit), gate_(gate) { advice_table_.push_back({}); }
  // Adjacent units of one reservation.
  struct Span {
    Reservation* reservation = nullptr;
    size_t first = 0, count = 0;
    uintptr_t address() const { return reservation->base + first * reservation->unit; }
    size_t size() const { return count * reservation->unit; }
    size_t unit_size() const { return reservation->unit; }  // bytes
    Unit& unit(size_t i) const { return reservation->units[first + i]; }
    // Calls body(run) for each longest run of units for which `of` is true, until one fails.
    template <typename Of, typename Body>
    core::Status runs(const Of& of, const Body& body) const {
      for (size_t i = 0; i < count; ++i) {
        const size_t begin = i;
        while (i < count && of(unit(i))) ++i;
        if (i == begin) continue;
        if (core::Status s = body(Span{reservation, first + begin, i - begin}); !s.ok()) return s;
      }
      return {};
    }
  };
  enum class Direction : uint8_t { in, out };

  // -ENODEV for a number that does not exist, else health().
  core::Status usable(int device);

  // Implemented by the backend. Arguments have been checked.
  virtual core::Status backend_memory(int device, Memory* out) = 0;
  // Sets base (aligned), backend and backend_size. Nothing is resident, and the whole backend range
  // is without access.
  virtual core::Status backend_reserve(Reservation& r) = 0;
  virtual void backend_release(Reservation& r) = 0;
  // -EIO: the range's addresses are no longer ours, so nothing may be changed there.
  virtual core::Status backend_present(const Reservation&) { return {}; }
  // Maps empty units at their own address, readable and writable. Only mmap: a thread may slip in
  // until the caller has shut them.
  virtual core::Status backend_map(const Span& span) = 0;
  // Called after the mapping has gone. Frees its memory before it returns.
  virtual void backend_unmapped(const Span&) {}
  // Gives the units zeroed memory on the device. Blocks until it is there.
  virtual core::Status backend_populate(const Span& span, int device) = 0;
  virtual core::Status backend_copy(int device, Direction direction, std::span<const Copy> copies, Ticket* done) = 0;
  // Unified only.
  virtual core::Status backend_migrate(const Span& span, int to) = 0;
  virtual core::Status backend_advise(Range range, Advice advice, int location, bool set) = 0;
  // Split only, instead of backend_map, backend_unmapped and backend_populate. Puts memory on the
  // device behind the units and its number into `piece`, nothing else. After an error no unit has
  // memory.
  virtual core::Status backend_back(const Span&, int device) {
    (void)device;
    return core::error(EOPNOTSUPP, "this backend has no pieces");
  }
  virtual void backend_unback(const Span&) {}
  // Takes a piece of the device for a unit of `size` bytes.
  virtual core::Status backend_take(int device, size_t size, uint32_t* piece) {
    (void)device, (void)size, (void)piece;
    return core::error(EOPNOTSUPP, "this backend has no pieces");
  }
  // Starts to copy a unit, which is not mapped, to a piece of another device. Device `by`, one of
  // the two, makes the copy.
  virtual core::Status backend_send_piece(const Span&, int device, uint32_t piece, int by, Ticket* done) {
    (void)device, (void)piece, (void)by, (void)done;
    return core::error(EOPNOTSUPP, "this backend has no pieces");
  }
  // Gives a piece back.
  virtual void backend_give(int device, size_t size, uint32_t piece) { (void)device, (void)size, (void)piece; }
  // Zeroes the units. Blocks until done.
  virtual core::Status backend_zero(const Span&) { return {}; }
  // Map and unmap units at their addresses, for their devices and for other seers() as far as
  // possible. If backend_show() fails no unit is mapped. If backend_hide() fails all are mapped,
  // except those marked shut because their device is lost.
  virtual core::Status backend_show(const Span&) { return {}; }
  virtual core::Status backend_hide(const Span&) { return {}; }
  // The units are mapped and on one device; a handle is of one unit. Marks their pieces as shared,
  // even if it fails.
  virtual core::Status backend_share(const Span&, Export how, int* descriptor) {
    (void)how, (void)descriptor;
    return core::error(EOPNOTSUPP, "memory of this backend cannot be exported");
  }
  // Gives another device access to mapped units, or takes it away.
  virtual core::Status backend_show_to(const Span&, int device, bool set) {
    (void)device, (void)set;
    return {};
  }
  virtual core::Status backend_pin(void* frames, size_t size) = 0;
  virtual core::Status backend_unpin(void* frames) = 0;
  virtual core::Status backend_before_write_protect(const Span&) { return {}; }
  virtual core::Status backend_before_punch(const Span&) { return {}; }

  // Bytes of made units and of units being made.
  uint64_t used(int device) const { return used_[device].load(std::memory_order_relaxed); }
  // Returns the reservation that holds the address, or null.
  ReservationPtr find(uintptr_t address) const;
  // Split: the devices that a mapped unit is mapped for, a bit each: its own, and those that advice
  // lets access it and that have a link.
  uint64_t seers(const Unit& unit) const;

  bool unified() const { return gate_ != nullptr; }
  // Maps units again after they were unmapped. Retries a refusal for as long as necessary, because
  // the holder of a lease on them does not know. False: a device is lost.
  bool show_again(const Span& span);
  // Calls show_again() for each unit that was unmapped with one that could not be. Marks those that
  // cannot be mapped as shut.
  void unhide(const Span& span);

  const size_t unit_;        // bytes; of ranges that are reserved without a unit
  std::vector<Info> infos_;  // filled by the backend's constructor

 private:
  CpuGate* const gate_;
  struct AdviceSet {
    static constexpr int kNowhere = -3;
    int preferred = kNowhere;
    bool read_mostly = false;
    uint64_t accessed_by = 0;  // bit per device
    friend bool operator==(const AdviceSet&, const AdviceSet&) = default;
  };
  // Checked ranges, sorted, adjacent ones joined. Keeps the reservations alive. Allocates nothing.
  struct Spans {
    core::InplaceVector<Span, kMostRanges> list;
    core::InplaceVector<ReservationPtr, kMostRanges> keep;
  };
  core::Status span_of(const char* what, Range range, unsigned allowed_states, ReservationPtr* keep, Span* out) const;
  core::Status resolve(const char* what, std::span<const Range> ranges, unsigned allowed_states, Spans* out) const;
  core::Status check_copies(const char* what, int device, std::span<const Copy> copies, unsigned allowed_states,
                            bool zeros, Spans* keep);
  core::Status present(const Spans& spans);
  core::Status make_range(size_t size, size_t unit, int device, void** base);
  core::Status make(const Span& span, int device);
  core::Status back(const Span& span, int device);
  void unback(const Span& span);
  void forget(const Span& span);  // the units are no longer made
  struct Patience {
    unsigned tries = 100;   // of a millisecond each
    uint64_t given_up = 0;  // bytes
    core::Status why;
  };
  core::Status map_units(std::span<const Range> ranges, bool zero_them);
  bool hide_at_last(const Span& unit, Patience* patience);
  void hide_insistently(const Span& unit);
  core::Status zero_fresh(const Span& span);
  static core::Status check_part(const char* what, const Copy& copy, const Reservation& r);
  struct Passage {  // a unit that goes to another device, or the end of a range
    Span unit;
    ReservationPtr keep = {};
    std::optional<Range> ends = {};  // the end of this range, and no unit
    core::Status refused = {};       // why no more of the range was begun
    int from = 0;
    uint32_t left = 0;  // its piece on `from`
    bool mapped = false;
    core::Status shown = {};  // mapped: the result of mapping it on the target
    Ticket copied = {};
  };
  core::Status begin_passage(Passage& p, int to, int by);
  core::Status end_passage(Passage& p, int to, int by);
  bool has_ended(const Passage& p);
  // Turns the span into punched holes, and no longer counts them as made.
  void unmake(const Span& span);
  core::Status apply_advice(const Span& span);
  core::Status show_to(const Span& span, int device, bool set);
  void show_to_seers(const Span& span);
  void mark(const Span& span, UnitState state);

  mutable std::shared_mutex registry_mutex_;
  std::map<uintptr_t, ReservationPtr> registry_;  // by base; protected by registry_mutex_
  mutable std::mutex advice_mutex_;
  core::InplaceVector<AdviceSet, 256> advice_table_;  // protected by advice_mutex_
  std::atomic<uint64_t> advised_{0};                  // how often a unit's advice was changed
  std::mutex pin_mutex_;
  std::map<uintptr_t, size_t> pins_;              // base -> bytes; protected by pin_mutex_
  std::atomic<uint64_t> used_[kMaxDevices] = {};  // bytes of made units
  std::atomic<uint64_t> given_up_{0};             // bytes of pieces that are out of use for good
};

// Replaces whatever is mapped there by address space without access, in one step; not inherited by
// fork, not dumped. Ends the process with a message if the kernel refuses, because the old mapping
// must not stay.
void place_hole(uintptr_t address, size_t size);

}  // namespace vmem::device
