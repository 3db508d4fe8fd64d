// bad_alloc without malloc. An exception is memory of malloc's, asked for where it is thrown and given back where it
// has been caught: under the pager's lock it may be neither (os_allocator.h).
#pragma once

namespace vmem::core {

[[noreturn]] void throw_bad_alloc();

}  // namespace vmem::core
