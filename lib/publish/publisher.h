// The helper thread of a process that lets itself be seen: writes its publication, answers vmemctl.
//
// The thread sleeps but for once a second, when it rewrites the file, and for requests. No other thread of the process
// ever touches the file: one that somebody truncates, or a full tmpfs, costs the publication and nothing else.
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

// What the thread asks of the process; called on it alone, with no lock held. They may take long, but must return soon
// once `stop` is set: the thread that stops the publisher may hold what they wait for.
struct Source {
  std::function<void(Snapshot*)> take;  // all but what the publisher knows itself: identity, times, sequence
  std::function<core::Status(const std::atomic<bool>& stop, const std::string& name, const std::string& value)> set;
  std::function<core::Status(const std::atomic<bool>& stop, const std::string& name, std::string* value)> get;
};

class Publisher {
 public:
  // Publishes in the first folder that can be had; an error names all that were tried. `where`: empty, or the one
  // folder to use (tests).
  static core::Status start(const Source& source, const std::string& where, std::unique_ptr<Publisher>* out);
  // Stops, and waits for the thread unless stop() said not to.
  ~Publisher();
  Publisher(const Publisher&) = delete;
  Publisher& operator=(const Publisher&) = delete;

  // The publication is gone when this returns; on the publisher's own thread (a request switched it off): soon after.
  void stop();
  bool stopping() const { return stop_.load(std::memory_order_acquire); }
  // At exit: takes the names away and leaves the thread alone. Blocks for at most one write of the file.
  void retire();
  // In a forked child: its copies of the descriptors are closed, so that the parent's death shows. Async-signal-safe.
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

  Fd file_, socket_;  // the thread's, once it runs; made anew under mutex_

  mutable core::Mutex mutex_;  // a leaf, held for system calls on the folder only
  std::string folder_path_ VMEM_GUARDED_BY(mutex_), name_ VMEM_GUARDED_BY(mutex_), socket_name_ VMEM_GUARDED_BY(mutex_);
  Fd folder_ VMEM_GUARDED_BY(mutex_);
};

}  // namespace vmem::publish
