//! The plot: for each line of the table what it came to, beside what was asked, as part of the latter.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::{Asked, Row, Samples, median};

/// A line of the plot.
pub(crate) struct Line {
    name: String,
    /// What it came to in each run, as part of what was asked; below 1 is better.
    values: Vec<f64>,
}

impl Line {
    /// None if one of the sides was not measured.
    pub(crate) fn new(row: &Row, samples: &Samples) -> Option<Line> {
        let (ours, other) = (samples.get(&row.ours)?, samples.get(&row.other)?);
        let other = median(other);
        let part = |ours: &f64| {
            let value = row.asked.value(*ours, other);
            match row.asked {
                Asked::AtMost(bar) | Asked::Added(bar) | Asked::Below(bar) => value / bar,
                Asked::AtLeast(bar) => bar / value,
            }
        };
        let name = format!("{} ({})", row.name, row.asked.told());
        Some(Line { name, values: ours.iter().map(part).collect() })
    }
}

/// Draws the lines into an SVG file.
pub(crate) fn draw(path: &Path, lines: &[Line]) -> Result<()> {
    const HEIGHT: u32 = 32;
    let size = (900, HEIGHT * (lines.len() as u32 + 3));
    let area = SVGBackend::new(path, size).into_drawing_area();
    let failed = |error: &dyn std::fmt::Display| anyhow!("cannot draw {}: {error}", path.display());
    area.fill(&WHITE).map_err(|error| failed(&error))?;
    let most = lines.iter().flat_map(|line| &line.values).fold(1.5f64, |most, value| most.max(*value));
    let mut chart = ChartBuilder::on(&area)
        .caption("of what is asked (below 1 is better)", ("sans-serif", 16))
        .margin(10)
        .x_label_area_size(24)
        .y_label_area_size(300)
        .build_cartesian_2d(0.0..most * 1.05, (0..lines.len().max(1)).into_segmented())
        .map_err(|error| failed(&error))?;
    let name = |at: &SegmentValue<usize>| match at {
        SegmentValue::CenterOf(number) => lines.get(*number).map_or_else(String::new, |line| line.name.clone()),
        _ => String::new(),
    };
    (chart.configure_mesh().disable_y_mesh().y_labels(lines.len() + 1).y_label_formatter(&name))
        .draw()
        .map_err(|error| failed(&error))?;
    for (number, line) in lines.iter().enumerate() {
        let at = SegmentValue::CenterOf(number);
        let colour = if median(&line.values) <= 1.0 { GREEN } else { RED };
        let bar = Rectangle::new(
            [(0.0, SegmentValue::Exact(number)), (median(&line.values), SegmentValue::Exact(number + 1))],
            colour.mix(0.4).filled(),
        );
        let mut bar = bar;
        bar.set_margin(5, 5, 0, 0);
        chart.draw_series([bar]).map_err(|error| failed(&error))?;
        let dots = line.values.iter().map(|value| Circle::new((*value, at.clone()), 2, BLACK.filled()));
        chart.draw_series(dots).map_err(|error| failed(&error))?;
    }
    let asked = [(1.0, SegmentValue::Exact(0)), (1.0, SegmentValue::Exact(lines.len()))];
    chart.draw_series([PathElement::new(asked, BLACK.stroke_width(2))]).map_err(|error| failed(&error))?;
    area.present().map_err(|error| failed(&error))
}
