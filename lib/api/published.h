// What this process lets vmemctl see and change.
#pragma once

#include <memory>

#include "core/status.h"
#include "publish/publisher.h"

namespace vmem::api {

class Runtime;

// The runtime outlives the publisher.
core::Status start_publisher(Runtime& runtime, std::unique_ptr<publish::Publisher>* out);

}  // namespace vmem::api
