#include "lockstep/comm/transport/compression_gauge.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

// The system counts in ticks of up to 10 ms.
constexpr milliseconds kLeastBusy{30};
constexpr std::uint64_t kLeastBytes = 256 * 1024;
// Less has the link waiting for us, or for the answers to small messages.
constexpr std::uint64_t kLeastWaiting = 64 * 1024;

// So many times faster than the link a processor must compress. It encrypts, adds and decompresses
// meanwhile, too. Less is needed to go on than to begin.
constexpr double kToBegin = 8;
constexpr double kToGoOn = 6;

double seconds(CompressionGauge::Duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

void CompressionGauge::look(const Link& link) {
  if (link.waiting < kLeastWaiting) {
    last_ = link;
    return;
  }
  const Duration busy = link.busy - last_.busy;
  const std::uint64_t bytes = link.bytes - last_.bytes;
  if (busy < kLeastBusy || bytes < kLeastBytes) return;
  const Duration receiver = link.receiver - last_.receiver;
  last_ = link;
  if (2 * receiver > busy) return;  // this says nothing about the link
  const double link_rate = connections_ * static_cast<double>(bytes) / seconds(busy);
  pays_ = rate() > (pays_ ? kToGoOn : kToBegin) * link_rate;
  // A processor that was slow when it was last measured is tried again after a while.
  if (pays_) return;
  bytes_ += kMemory / 16;
  seconds_ += kMemory / 16 / kAssumedRate;
  forget();
}

void CompressionGauge::add_cost(std::size_t bytes, Duration time) {
  bytes_ += static_cast<double>(bytes);
  seconds_ += seconds(time);
  forget();
}

void CompressionGauge::forget() {
  if (bytes_ < 2 * kMemory) return;
  bytes_ /= 2;
  seconds_ /= 2;
}

}  // namespace lockstep
