// Publishes the state and settings of this process to vmemctl.
#pragma once

#include <memory>

#include "core/status.h"
#include "publish/publisher.h"

namespace vmem::api {

class Runtime;

// Starts the publisher. The runtime must outlive it.
core::Status start_publisher(Runtime& runtime, std::unique_ptr<publish::Publisher>* out);

}  // namespace vmem::api
