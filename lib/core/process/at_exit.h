// Runs the library's work at the end of the process, in the right order. exit() calls its handlers
// in reverse order of registration.
#pragma once

namespace vmem::core {

// Sets the exit work and registers it with exit(). Call once. The work may run several times. Any
// thread.
void set_exit_work(void (*work)());

// Makes the exit work run once more, ahead of every exit handler registered so far. Call it after
// something that the work needs has registered its own handler, such as a CUDA context. Otherwise a
// program that uses regions before CUDA would lose its context first, and with it the data that
// only the device has. Does nothing if no work is set. Any thread.
void do_exit_work_before_this();

// Runs the exit work now: the library is about to end the process and has logged why. Call on a
// library thread that holds no lock.
void do_exit_work_at_our_end();
// True once do_exit_work_at_our_end() has been called.
bool at_our_end();

// True once exit() has begun to run the work.
bool exiting();

}  // namespace vmem::core
