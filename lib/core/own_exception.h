// Throws bad_alloc without malloc. An ordinary throw allocates the exception with malloc, and its
// catcher frees it. Under the pager's lock neither is allowed (os_allocator.h).
#pragma once

namespace vmem::core {

[[noreturn]] void throw_bad_alloc();

}  // namespace vmem::core
