// What is done at the end of the process, and in which order. exit() calls its handlers backwards: what came up last
// goes down first.
#pragma once

namespace vmem::core {

// The work: may be done several times. Called once, by whoever has the work. Any thread.
void set_exit_work(void (*work)());

// From now on the work is done, once more, before anything goes down at exit that has come up by now. For what the work
// needs and what ends by a handler of its own, as a CUDA context does: a program that uses regions before it uses CUDA
// would lose its context first, and what only the device has with it. Nothing without work. Any thread.
void do_exit_work_before_this();

// Does the work, now: the library is about to end the process, and has said why. A thread of ours without locks.
void do_exit_work_at_our_end();
// It does so.
bool at_our_end();

// Exit has begun to do the work.
bool exiting();

}  // namespace vmem::core
