// Ranks that bring lanes as the input says, to the sums of the gradient server. A frame that does
// not fit is an Error that names its rank; what is finished has as many elements as were brought.
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/server/lane_sums.h"
#include "tests/fuzz/script.h"

using namespace lockstep;
using fuzz::require;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Script script(data, size);
  LaneSums sums({"a", "b", "c"});
  // What a rank has been told to go on with.
  std::vector<std::optional<BulkHead>> accepted(3);
  while (!script.ended()) {
    const int rank = script.byte() % 3;
    auto& open = accepted[static_cast<std::size_t>(rank)];
    try {
      if (open) {
        LaneValue value;
        value.data.assign(static_cast<std::size_t>(open->count), 0.5F);
        value.tail.assign(open->tail_count, 0.25);
        if (script.byte() == 255 && !value.data.empty()) value.data[0] = 1.0F / 0.0F;
        const BulkHead head = *open;
        open.reset();
        sums.add(rank, head, std::move(value));
      } else {
        BulkHead head;
        const std::uint8_t kind = script.byte();
        head.tag = kind < 250 ? WireTag::kPartialSum : WireTag::kBytes;
        head.step = script.byte() % 3;
        head.call = script.byte() / 128;
        head.lanes = kind % 8 == 7 ? static_cast<std::uint32_t>(script.number(4)) : 4;
        head.lane_begin = script.byte() % 6;
        head.lane_end = script.byte() % 6;
        head.offset = script.byte() % 2;
        head.count = script.byte() % 4;
        head.tail_count = script.byte() % 2;
        if (sums.offer(rank, head)) open = head;
      }
      while (const auto piece = sums.take_finished()) {
        require(piece->sum.data.size() == piece->head.count &&
                piece->sum.tail.size() == piece->head.tail_count);
      }
      sums.check_stuck();
      sums.missing();
    } catch (const Error& error) {
      require(error.rank() >= -1 && error.rank() < 3);
      return 0;  // the job has ended
    }
  }
  return 0;
}
