// The helper thread of a process that shows itself: writes its publication and answers vmemctl.
//
// The thread wakes once a second to rewrite the file, and for requests. No other thread of the
// process touches the file: if another program truncates it, or a tmpfs is full, only the
// publication is lost.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "core/mutex.h"
#include "publish/layout.h"
#include "publish/place.h"

namespace vmem::publish {

// The calls that the thread makes into the process; made on it alone, with no lock held. They may
// take long, but must return soon once `stop` is set: the thread that stops the publisher may hold
// what they wait for.
struct Source {
  std::function<void(Snapshot*)> take;  // all except the publisher's own fields: identity, times, sequence
  std::function<core::Status(const std::atomic<bool>& stop, const std::string& name, const std::string& value)> set;
  std::function<core::Status(const std::atomic<bool>& stop, const std::string& name, std::string* value)> get;
};

class Publisher {
 public:
  // Publishes in the first usable folder; an error names all that were tried. `where`: empty, or
  // the only folder to use (tests).
  static core::Status start(const Source& source, const std::string& where, std::unique_ptr<Publisher>* out);
  // Stops, and waits for the thread.
  ~Publisher();
  Publisher(const Publisher&) = delete;
  Publisher& operator=(const Publisher&) = delete;

  // The publication is gone when this returns. On the publisher's own thread (a request switched it
  // off) it goes soon after.
  void stop();
  bool stopping() const { return stop_.load(std::memory_order_acquire); }
  // At exit: removes the names and leaves the thread alone. Blocks only while the thread makes
  // system calls on the folder.
  void retire();
  // Closes a forked child's copies of the descriptors, so that the parent's death shows.
  // Async-signal-safe.
  static void after_fork_in_child();
  std::string path() const;

 private:
  explicit Publisher(const Source& source) : source_(source) {}
  core::Status create();
  core::Status create_in(const std::string& folder);
  void remove();  // needs no memory
  bool has_its_user() const;
  void leave();
  void run();
  void write();
  bool still_there() const;
  void answer(const Fd& client);
  core::Status handle(const Request& request, std::string* text);

  const Source source_;
  std::string where_;
  std::atomic<bool> stop_{false}, retired_{false};
  Fd wake_;
  std::thread thread_;
  Snapshot snapshot_;             // the thread's
  std::vector<std::byte> bytes_;  // the thread's
  bool said_full_ = false;

  Fd file_, socket_;  // the thread's, once it runs; replaced under mutex_

  mutable core::Mutex mutex_;  // a leaf, held for system calls on the folder only
  std::string folder_path_ VMEM_GUARDED_BY(mutex_), name_ VMEM_GUARDED_BY(mutex_), socket_name_ VMEM_GUARDED_BY(mutex_);
  Fd folder_ VMEM_GUARDED_BY(mutex_);
};

}  // namespace vmem::publish
