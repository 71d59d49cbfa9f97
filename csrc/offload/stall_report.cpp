// The report on a worker that finishes no chunk: the last task of each lane.
#include <cstdio>
#include <utility>

#include "hytrain/clock.h"
#include "hytrain/update_worker.h"

namespace hytrain {

namespace {

std::string seconds_since(std::int64_t ns) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.1f s ago", static_cast<double>(now_ns() - ns) * 1e-9);
    return text;
}

}  // namespace

void UpdateWorker::on_stall(std::chrono::milliseconds after,
                            std::function<void(const std::string&)> report) {
    stall_after_ = after;
    stall_report_ = std::move(report);
}

void UpdateWorker::note(TaskLane lane, std::string what, const Place& place, EventHandle end) {
    if (!stall_report_) return;
    std::lock_guard<std::mutex> lock(tasks_mutex_);
    tasks_[lane] = Task{std::move(what), place, now_ns(), end};
}

std::string UpdateWorker::describe_tasks(std::size_t jobs_left) {
    device_->attach_thread();
    std::lock_guard<std::mutex> lock(tasks_mutex_);
    static const char* const names[kTaskLanes] = {"CPU update", "copies to the host",
                                                  "copies to the device"};
    std::string text;
    for (int lane = 0; lane < kTaskLanes; ++lane) {
        const Task& task = tasks_[lane];
        text += std::string(names[lane]) + ": ";
        if (task.what.empty()) {
            text += "nothing yet; ";
            continue;
        }
        const Layer& layer = layers_[static_cast<std::size_t>(task.place.layer)];
        text += task.what + " of layer '" + layer.name + "', chunk " +
                std::to_string(task.place.chunk) + ", " + seconds_since(task.since_ns);
        const char* waits_for = waits_for_;
        if (lane == kUpdates && waits_for != nullptr)
            text += std::string(", waits for ") + waits_for;
        if (task.end != kNoEvent) {
            text += device_->is_complete(task.end) ? ", complete" : ", not complete";
        }
        text += "; ";
    }
    return text + std::to_string(jobs_left) + " jobs left";
}

}  // namespace hytrain
